"""Executes a plan: requests go from operator to operator on devices that share their time.

Each replica is a server of its station. A server takes up to a batch of what waits, oldest first; a
device divides its time evenly over its servers at work and does what the curve of shares says that
it then yields. Data goes over each device's link, one transfer after the other. Time is a heap
clock's, arrivals are drawn from a seed. Before: `mesh.plan`. After: `mesh.evaluation.operators`.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import OUTSIDE_LAYERS, Operator, OperatorTable, Phase, Role
from mesh.plan.placement import Placement
from mesh.plan.problem import LANES_MAX, Plan
from mesh.sim.clock import HeapClock

EVENTS_MAX = 20_000_000
SERVERS_MAX = 1 << 20
"""At work on a device at a time, where nothing is said."""
KNOWN_MAX = 10_000
"""Batches whose seconds a station keeps."""
CONSERVED = 1e-9
"""By which the time of a device may be off, in seconds for each second admitted and at least."""
LOAD_BYTES_PER_S = 13.5e9
"""At which a new replica's weights come (ServerlessLLM's loader on an A100)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt of `tokens`, or a sequence with a context of so many that wants `passes` tokens."""

    at_s: float
    tokens: int
    passes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What became of the requests that count, and what it took."""

    met: float
    """The share of requests whose iterations took, in the mean of each, no more than the SLO."""
    mean_s: float
    """The mean of an iteration, from when it could begin."""
    requests: int
    duration_s: float
    device_s: float
    """Seconds of work, at full speed, that all groups did."""
    busy_s: float
    """Seconds in which groups were at work, summed."""
    used: float
    """`device_s` over what the groups could have done by the curve, had all worked throughout."""
    energy_j: float
    memory_bytes: int
    moved_bytes: int
    """What went over links."""


@dataclass(slots=True, eq=False)
class _Pass:
    """A request under way, in one of its passes."""

    number: int
    request: Request
    left: int
    began_s: float
    spent_s: float = 0.0
    step: int = 0
    home: "_Server | None" = None


@dataclass(slots=True, eq=False)
class _Server:
    station: "_Station"
    device: "_Device"
    number: int = -1
    batch: list[_Pass] = field(default_factory=list)
    left_s: float = 0.0
    homes: int = 0
    waiting: list[tuple[float, int, _Pass]] = field(default_factory=list)
    """Those whose KV cache is here."""
    leaving: bool = False


@dataclass(slots=True, eq=False)
class _Station:
    operators: tuple[Operator, ...]
    batch_max: int
    keeps: bool
    """Whether a sequence comes back to the same server: its KV cache is there."""
    share: float
    """The part of its layers that a visit computes."""
    output_bytes: int
    servers: list[_Server] = field(default_factory=list)
    numbered: int = 0
    known_s: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Seconds by lengths."""
    waiting: list[tuple[float, int, _Pass]] = field(default_factory=list)


class _Device:
    """Divides its time over the servers at work."""

    def __init__(self, number: int, yields: Sequence[float]) -> None:
        self.number = number
        self.yields = yields
        self.active: list[_Server] = []
        self.servers: list[_Server] = []
        self.then_s = 0.0
        self.version = 0
        self.admitted_s = self.done_s = self.busy_s = 0.0
        self.link_free_s = 0.0

    def speed(self) -> float:
        """Seconds of work in a second, of each server at work."""
        sharers = len(self.active)
        return self.yields[min(sharers, len(self.yields) - 1)] / sharers

    def advance(self, now_s: float) -> None:
        """Do what time has passed for. Raises AssertionError where time is not conserved."""
        passed_s = now_s - self.then_s
        self.then_s = now_s
        if not self.active or passed_s <= 0:
            return
        done_s = passed_s * self.speed()
        self.busy_s += passed_s
        self.done_s += done_s * len(self.active)
        for server in self.active:
            server.left_s -= done_s
        left_s = sum(server.left_s for server in self.active)
        off_s = abs(self.admitted_s - self.done_s - left_s)
        assert off_s <= CONSERVED * max(self.admitted_s, 1.0), (
            f"device {self.number}: {self.admitted_s} s were admitted, {self.done_s} s done and "
            f"{left_s} s are left"
        )


class Execution:
    """A plan at work. `run` ends it; `change` puts another plan of the same stations in its place.

    A device has at most `lanes` servers at work at a time. `visits` says in how many turns an
    iteration comes by the operators of its layers: as many as there are layers, or fewer, each of
    several. An execution ends early with more than `misses_max` requests that missed. Raises
    InvalidInput for a placement of another plan.
    """

    def __init__(
        self,
        table: OperatorTable,
        plan: Plan,
        placement: Placement,
        *,
        slo_s: float,
        lanes: int | None = None,
        visits: int | None = None,
        misses_max: int | None = None,
    ) -> None:
        self._table = table
        self._slo_s = slo_s
        self._clock = HeapClock()
        self._lanes = lanes or SERVERS_MAX
        self._visits = min(visits or table.layers, table.layers)
        self._yields = table.curve.yields(LANES_MAX)
        self._devices: dict[int, _Device] = {}
        self._stations: list[_Station] = []
        self._plan = plan
        self._misses_max = misses_max
        self._misses = self._ended = self._warm = self._moved_bytes = 0
        self._means_s: list[float] = []
        self._device_seconds = 0.0
        """Seconds for which groups were held, until the last change."""
        self._since_s = 0.0
        if len(placement) != len(plan.stations):
            raise InvalidInput("the placement is of another plan: its stations differ")
        self._make(plan)
        self._staff(plan, placement, load=False)
        self._route = self._steps()

    def run(self, requests: Iterable[Request], warm: int = 0) -> Executed:
        """All requests to their end; the first `warm` do not count."""
        every = list(requests)
        if not every:
            raise InvalidInput("there is nothing to execute", hint="give requests")
        for number, request in enumerate(every):
            one = _Pass(number, request, request.passes, request.at_s)
            self._clock.call_at(request.at_s, partial(self._begin, one))
        self._warm = warm
        for _ in range(EVENTS_MAX):
            if self._misses_max is not None and self._misses > self._misses_max:
                break
            if self._ended == len(every) or not self._clock.step():
                break
        else:
            raise InvalidInput(f"the execution has more than {EVENTS_MAX} events")
        return self._told(len(every) - warm)

    def change(self, at_s: float, plan: Plan, placement: Placement) -> None:
        """Have other replicas from `at_s` on: new ones serve once their weights are there, those
        that go finish what they compute, and sequences kept there move with their KV cache.
        """
        if [each.roles for each in plan.stations] != [each.roles for each in self._plan.stations]:
            raise InvalidInput("a plan that takes another's place must have its stations")
        self._clock.call_at(at_s, partial(self._staff, plan, placement, load=True))

    def _make(self, plan: Plan) -> None:
        decode = self._table.phase is Phase.DECODE
        for each in plan.stations:
            chosen = tuple(op for op in self._table.operators if op.role in each.roles)
            single = len(chosen) == 1
            layered = single and chosen[0].role not in OUTSIDE_LAYERS
            self._stations.append(
                _Station(
                    operators=chosen,
                    batch_max=each.batch,
                    keeps=decode and Role.ATTENTION in each.roles,
                    share=1 / self._visits if layered else 1.0,
                    output_bytes=chosen[-1].output_bytes_per_row
                    * (chosen[-1].repeats // self._visits if layered else 1),
                )
            )

    def _steps(self) -> list[int]:
        """The stations that an iteration comes by, in order."""
        if len(self._stations) == 1:
            return [0]
        outside = [of.operators[0].role in OUTSIDE_LAYERS for of in self._stations]
        inner = [number for number, out in enumerate(outside) if not out]
        first = [n for n, of in enumerate(self._stations) if of.operators[0].role is Role.EMBEDDING]
        last = [n for n, of in enumerate(self._stations) if of.operators[0].role is Role.HEAD]
        return [*first, *inner * self._visits, *last]

    def _staff(self, plan: Plan, placement: Placement, *, load: bool) -> None:
        now_s = self._clock.now_s()
        self._hold(now_s)
        for number, (station, devices) in enumerate(zip(self._stations, placement, strict=True)):
            station.batch_max = plan.stations[number].batch
            left, going = list(devices), []
            for server in station.servers:
                if server.device.number in left:
                    left.remove(server.device.number)
                else:
                    going.append(server)
            new = [_Server(station, self._device(device)) for device in left]
            if load and new:
                weights = sum(each.weights_bytes for each in station.operators)
                joined = partial(self._joined, station, new, going)
                self._clock.call_at(now_s + weights / LOAD_BYTES_PER_S, joined)
            else:
                self._joined(station, new, going)
        self._plan = plan

    def _joined(self, station: _Station, new: Sequence[_Server], going: Sequence[_Server]) -> None:
        """New servers serve, and those that go take nothing more."""
        self._hold(self._clock.now_s())
        for server in new:
            server.number = station.numbered
            station.numbered += 1
            station.servers.append(server)
            server.device.servers.append(server)
        for server in going:
            server.leaving = True
            server.device.servers.remove(server)
        self._clear(station)
        for server in going:
            waiting, server.waiting = server.waiting, []
            self._queue(station, [one for _, _, one in waiting])
        self._serve(station)

    def _clear(self, station: _Station) -> None:
        station.servers = [of for of in station.servers if not of.leaving or of.batch]

    def _device(self, number: int) -> _Device:
        if number not in self._devices:
            self._devices[number] = _Device(number, self._yields)
            self._devices[number].then_s = self._clock.now_s()
        return self._devices[number]

    def _hold(self, now_s: float) -> None:
        """Count the groups that were held until now."""
        used = {server.device.number for of in self._stations for server in of.servers}
        self._device_seconds += len(used) * (now_s - self._since_s)
        self._since_s = now_s

    def _begin(self, one: _Pass) -> None:
        one.began_s = self._clock.now_s()
        one.step = 0
        self._wait(self._stations[self._route[0]], [one])

    def _queue(self, station: _Station, batch: Iterable[_Pass]) -> None:
        for one in batch:
            if station.keeps:
                if one.home is None or one.home.leaving:
                    self._house(one, [of for of in station.servers if not of.leaving])
                assert one.home is not None
                queue = one.home.waiting
            else:
                queue = station.waiting
            heappush(queue, (one.began_s, one.number, one))

    def _house(self, one: _Pass, servers: Sequence[_Server]) -> None:
        """Give a sequence a server that keeps its KV cache, which moves if it is elsewhere."""
        server = min(servers, key=lambda of: (of.homes, of.number))
        if one.home is not None:
            one.home.homes -= 1
            kept = sum(each.kv_bytes_per_token for each in server.station.operators)
            self._transfer(one.home.device, kept * one.request.tokens)
        one.home = server
        server.homes += 1

    def _transfer(self, source: _Device, size: int) -> float:
        """When data that leaves a device now has arrived."""
        now_s = self._clock.now_s()
        device = self._table.device
        source.link_free_s = (
            max(source.link_free_s, now_s) + device.link_latency_s + size / device.link_bytes_per_s
        )
        self._moved_bytes += size
        return source.link_free_s

    def _serve(self, station: _Station) -> None:
        """Give servers without work what waits, where their device has a lane free."""
        if station.keeps:
            for keeper in station.servers:
                if keeper.waiting and self._free(keeper):
                    self._start(keeper, keeper.waiting)
            return
        while station.waiting and (server := self._freest(station)) is not None:
            self._start(server, station.waiting)

    def _freest(self, station: _Station) -> _Server | None:
        """The server, of those without work, whose device has the least to do now, then until now:
        what is everywhere would else hold up what only some devices have.
        """
        found, least = None, (math.inf, 0.0)
        for server in station.servers:
            if server.batch or server.leaving:
                continue
            device = server.device
            work = len(device.active), device.admitted_s
            if work[0] < self._lanes and work < least:
                found, least = server, work
        return found

    def _free(self, server: _Server) -> bool:
        return not server.batch and not server.leaving and len(server.device.active) < self._lanes

    def _offer(self, device: _Device) -> None:
        """Give a device's lanes that are free to the oldest that waits for one of its servers."""
        while len(device.active) < self._lanes:
            oldest: tuple[float, int] = (math.inf, 0)
            for server in device.servers:
                queue = server.waiting if server.station.keeps else server.station.waiting
                if queue and self._free(server) and queue[0][:2] < oldest:
                    oldest, chosen, waiting = queue[0][:2], server, queue
            if oldest[0] == math.inf:
                return
            self._start(chosen, waiting)

    def _start(self, server: _Server, waiting: list[tuple[float, int, _Pass]]) -> None:
        station = server.station
        others = []
        while waiting and len(server.batch) < station.batch_max:
            first = heappop(waiting)
            # Layers have weights of their own: only what is at the same one goes together.
            if server.batch and first[2].step != server.batch[0].step:
                others.append(first)
            else:
                server.batch.append(first[2])
        for first in others:
            heappush(waiting, first)
        lengths = [one.request.tokens for one in server.batch]
        key = tuple(lengths)
        if (work_s := station.known_s.get(key)) is None:
            phase = self._table.phase
            work_s = station.share * sum(of.seconds(phase, lengths) for of in station.operators)
            if len(station.known_s) < KNOWN_MAX:
                station.known_s[key] = work_s
        device = server.device
        device.advance(self._clock.now_s())
        server.left_s = work_s
        device.admitted_s += work_s
        device.active.append(server)
        self._await(device)

    def _await(self, device: _Device) -> None:
        """Come back when the next server of a device is done, unless its work changes before."""
        device.version += 1
        if not device.active:
            return
        version = device.version
        least_s = min(server.left_s for server in device.active)
        now_s = self._clock.now_s()
        self._clock.call_at(
            now_s + max(least_s, 0.0) / device.speed(), partial(self._due, device, version)
        )

    def _due(self, device: _Device, version: int) -> None:
        if version != device.version:
            return
        device.advance(self._clock.now_s())
        least_s = min(server.left_s for server in device.active)
        done = [of for of in device.active if of.left_s <= max(least_s, 0.0) + 1e-15]
        for server in done:
            device.active.remove(server)
            # What rounding has left is done, or was done too much: it is below CONSERVED.
            device.admitted_s -= server.left_s
            server.left_s = 0.0
        self._await(device)
        for server in done:
            batch, server.batch = server.batch, []
            for one in batch:
                one.step += 1
            if server.leaving:
                self._clear(server.station)
            if batch[0].step == len(self._route):
                batch = self._pass_over(batch)
            if batch:
                self._hand_on(server, batch)
        self._offer(device)

    def _hand_on(self, server: _Server, batch: Sequence[_Pass]) -> None:
        """Data stays on its device where the next station would have it there; else it goes over
        the link and waits for any server.
        """
        device, step = server.device, batch[0].step
        station = self._stations[self._route[step]]
        if step == 0 or (station.keeps and all(one.home in device.servers for one in batch)):
            self._wait(station, batch)
            return
        if not station.keeps and not station.waiting:
            free = self._freest(station)
            if free is not None and free.device is device:
                self._wait(station, batch)
                return
        prefill = self._table.phase is Phase.PREFILL
        rows = sum(one.request.tokens for one in batch) if prefill else len(batch)
        at_s = self._transfer(device, rows * server.station.output_bytes)
        self._clock.call_at(at_s, partial(self._wait, station, batch))

    def _wait(self, station: _Station, batch: Sequence[_Pass]) -> None:
        self._queue(station, batch)
        self._serve(station)

    def _pass_over(self, ones: Sequence[_Pass]) -> list[_Pass]:
        """Those that want another token, at its beginning."""
        now_s = self._clock.now_s()
        again = []
        for one in ones:
            one.spent_s += now_s - one.began_s
            one.left -= 1
            if one.left:
                one.began_s, one.step = now_s, 0
                again.append(one)
            else:
                self._over(one)
        return again

    def _over(self, one: _Pass) -> None:
        self._ended += 1
        if one.home is not None:
            one.home.homes -= 1
        if one.number < self._warm:
            return
        mean_s = one.spent_s / one.request.passes
        self._means_s.append(mean_s)
        self._misses += mean_s > self._slo_s

    def _told(self, wanted: int) -> Executed:
        now_s = self._clock.now_s()
        self._hold(now_s)
        devices = list(self._devices.values())
        for device in devices:
            device.advance(now_s)
        kind, group = self._table.device, self._table.devices
        busy_s = sum(device.busy_s for device in devices)
        done_s = sum(device.done_s for device in devices)
        idle_j = kind.idle_watts * self._device_seconds
        busy_j = (kind.busy_watts - kind.idle_watts) * busy_s
        counted = len(self._means_s)
        return Executed(
            met=1 - (self._misses + max(wanted - counted, 0)) / wanted,
            mean_s=sum(self._means_s) / counted if counted else float("inf"),
            requests=counted,
            duration_s=now_s,
            device_s=done_s,
            busy_s=busy_s,
            used=done_s / max(self._device_seconds * self._yields[-1], 1e-12),
            energy_j=group * (idle_j + busy_j),
            memory_bytes=sum(
                group * len(of.servers) * sum(each.weights_bytes for each in of.operators)
                for of in self._stations
            ),
            moved_bytes=self._moved_bytes,
        )


def poisson(
    rate_per_s: float, lengths: Sequence[int], count: int, seed: int, passes: int = 1
) -> list[Request]:
    """So many requests of a Poisson process, with equally likely lengths."""
    draw = random.Random(seed)
    at_s = 0.0
    found = []
    for _ in range(count):
        at_s += draw.expovariate(rate_per_s)
        found.append(Request(at_s=at_s, tokens=draw.choice(lengths), passes=passes))
    return found
