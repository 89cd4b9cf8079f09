"""Executes a plan: requests go from operator to operator on devices that share their time.

Each replica is a server of its station. A server takes up to a batch of what waits, oldest first; a
device divides its time evenly over its servers at work and does what the curve of shares says that
it then yields. It holds the weights of each of its stations once, the KV cache of the sequences
that live there and the activations of what is at work; what does not fit waits. Data goes over the
link of the device that sends, one transfer after the other. Plans do not change while requests run.
Time is a heap clock's, arrivals are drawn from a seed. Before: `mesh.plan`. After:
`mesh.evaluation.operators`.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import lru_cache, partial
from heapq import heappop, heappush

from mesh.domain.errors import InvalidInput
from mesh.domain.operators import OUTSIDE_LAYERS, OperatorTable, Phase, Role
from mesh.domain.values import dataclass
from mesh.plan.placement import Placement
from mesh.plan.problem import LANES_MAX, Plan, Staffed
from mesh.sim.clock import HeapClock

EVENTS_MAX = 20_000_000
KNOWN_MAX = 10_000
"""How many batches a station keeps the seconds of."""
CONSERVED = 1e-9
"""The share of the seconds admitted, or of 1 s if these are fewer, by which time may be off."""


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
    """The mean seconds of an iteration, from the time at which it could begin."""
    requests: int
    """The number of requests that ended, with those that do not count."""
    device_s: float
    """Seconds of work, at full speed, that all groups did."""
    busy_s: float
    """Seconds in which groups were at work, summed."""
    energy_j: float
    memory_bytes: int
    """The most that each device held, summed."""
    moved_bytes: int
    """The bytes that went over links."""


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
    """The server that keeps its KV cache."""
    device: "_Device | None" = None
    """Where its data is; `None` before it has been anywhere."""


@dataclass(slots=True, eq=False)
class _Server:
    station: "_Station"
    device: "_Device"
    number: int
    waiting: list[tuple[float, int, _Pass]]
    """The requests that it may take: its station's, or those whose KV cache is here."""
    batch: list[_Pass] = field(default_factory=list)
    work_s: float = 0.0
    left_s: float = 0.0
    work_bytes: int = 0
    size: int = 0
    """The tokens of its batch, or its sequences when decoding: which curve of shares holds."""
    homes: int = 0


class _Station:
    """An operator, or a whole model, whose iterations come by it in so many `visits`."""

    def __init__(self, table: OperatorTable, staffed: Staffed, visits: int) -> None:
        self.operators = tuple(one for one in table.operators if one.role in staffed.choice.roles)
        *_, last = self.operators
        layered = len(self.operators) == 1 and last.role not in OUTSIDE_LAYERS
        self.batch_max = staffed.batch
        self.decodes = table.phase is Phase.DECODE
        self.keeps = self.decodes and Role.ATTENTION in staffed.choice.roles
        """Whether a sequence comes back to the same server: its KV cache is there."""
        self.share = 1 / visits if layered else 1.0
        """The part of its layers that a visit computes."""
        self.hops = last.repeats / visits if layered else 1.0
        """The layers of a visit: so many transfers stand behind one of its own."""
        self.output_bytes = last.output_bytes_per_row * self.hops
        """What a visit hands on for each row."""
        self.weights_bytes = sum(one.weights_bytes for one in self.operators)
        self.kv_bytes_per_token = sum(one.kv_bytes_per_token for one in self.operators)
        rows = {one.role: one.transient_bytes_per_row for one in self.operators}
        self.head_bytes = rows.pop(Role.HEAD, 0)
        """Activations of each sequence, in the head."""
        self.transient_bytes = max(rows.values(), default=0)
        """Activations of each token at work, in the other operators."""
        self.servers: list[_Server] = []
        self.seconds = lru_cache(KNOWN_MAX)(partial(self._seconds, table.phase))
        """Seconds of a visit, by the lengths of its batch."""
        self.waiting: list[tuple[float, int, _Pass]] = []
        """Requests that any server may take; where the KV cache is kept, those that no device has
        memory for yet.
        """

    def _seconds(self, phase: Phase, lengths: tuple[int, ...]) -> float:
        return self.share * sum(each.seconds(phase, lengths) for each in self.operators)

    def handed_on(self, one: _Pass) -> int:
        """Bytes of a request that the next station needs."""
        return round((1 if self.decodes else one.request.tokens) * self.output_bytes)

    def size(self, one: _Pass) -> int:
        """Bytes that a request takes while it is at work, beside what is kept of it."""
        if self.decodes:
            return max(self.transient_bytes, self.head_bytes)
        tokens = one.request.tokens
        kept = self.kv_bytes_per_token * tokens
        return kept + max(self.transient_bytes * tokens, self.head_bytes)


class _Device:
    """Divides its time over the servers at work, and its memory over all."""

    def __init__(self, number: int, memory_bytes: int) -> None:
        self.number = number
        self.memory_bytes = memory_bytes
        self.held_bytes = self.work_bytes = self.reserved_bytes = self.peak_bytes = 0
        self.kv_room = 0
        """Bytes for KV cache before any is there."""
        self.receiving = 0
        """Servers whose batch is still on its way."""
        self.speed_s = 0.0
        """Seconds of work in a second, of each server at work."""
        self.active: list[_Server] = []
        self.servers: list[_Server] = []
        self.then_s = 0.0
        self.version = 0
        self.admitted_s = self.done_s = self.busy_s = 0.0
        self.link_free_s = 0.0

    def room(self) -> int:
        """Bytes for KV cache: the largest batch has its activations beside it."""
        return self.memory_bytes - self.held_bytes - self.reserved_bytes

    def work_room(self) -> int:
        """Bytes for activations, now."""
        return self.memory_bytes - self.held_bytes - self.work_bytes

    def take(self, kept: int = 0, work: int = 0) -> None:
        """Take more bytes, or fewer, for what is kept and for what is at work."""
        self.held_bytes += kept
        self.work_bytes += work
        taken = self.held_bytes + self.work_bytes
        self.peak_bytes = max(self.peak_bytes, taken)
        assert taken <= self.memory_bytes, f"device {self.number} holds {taken} bytes"

    def advance(self, now_s: float) -> None:
        """Do the work of the time that has passed. Raises AssertionError if some is lost."""
        passed_s = now_s - self.then_s
        self.then_s = now_s
        if not self.active or passed_s <= 0:
            return
        done_s = passed_s * self.speed_s
        self.busy_s += passed_s
        self.done_s += done_s * len(self.active)
        for server in self.active:
            server.left_s -= done_s
        left_s = sum(server.left_s for server in self.active)
        off_s = abs(self.admitted_s - self.done_s - left_s)
        assert self.busy_s <= now_s * (1 + CONSERVED), f"device {self.number} works in the past"
        assert off_s <= CONSERVED * max(self.admitted_s, 1.0), (
            f"device {self.number}: {self.admitted_s} s were admitted, {self.done_s} s done and "
            f"{left_s} s are left"
        )


class Execution:
    """A plan at work; `run` runs it, once.

    A device has at most `lanes` servers at work at a time. `visits` says in how many turns an
    iteration comes by the operators of its layers: as many as there are layers, or fewer, each of
    several: a transfer then stands for those of its layers. An execution ends early with more than
    `misses_max` requests that missed. Raises InvalidInput for a placement of another plan, or one
    that a device has no memory for; `run` raises it for a request that fits no device.
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
        self._lanes = math.inf if lanes is None else lanes
        visits = table.layers if visits is None else min(visits, table.layers)
        self._sizes = [size for size, _ in table.curves]
        self._yields = [curve.yields(LANES_MAX) for _, curve in table.curves]
        self._devices: dict[int, _Device] = {}
        self._stations = [_Station(table, each, visits) for each in plan]
        self._misses_max = math.inf if misses_max is None else misses_max
        self._misses = self._ended = self._warm = self._moved_bytes = 0
        self._means_s: list[float] = []
        if [*map(len, placement)] != [each.replicas for each in plan]:
            raise InvalidInput("the placement is of another plan: its stations or replicas differ")
        self._staff(placement)
        every = [*range(len(self._stations))]
        self._route = every if len(every) == 1 else [0, *every[1:-1] * visits, every[-1]]
        """The stations that an iteration comes by: embedding, layers, head."""

    def run(self, requests: Iterable[Request], warm: int = 0) -> Executed:
        """Execute all requests to their end; the first `warm` do not count."""
        every = list(requests)
        if not every:
            raise InvalidInput("there is nothing to execute", hint="give requests")
        for number, request in enumerate(every):
            one = _Pass(number, request, request.passes, request.at_s)
            self._clock.call_at(request.at_s, partial(self._go_on, [one]))
        self._warm = warm
        for _ in range(EVENTS_MAX):
            over = self._misses > self._misses_max or self._ended == len(every)
            if over or not self._clock.step():
                break
        else:
            raise InvalidInput(f"the execution has more than {EVENTS_MAX} events")
        return self._result(len(every) - warm)

    def _staff(self, placement: Placement) -> None:
        for station, devices in zip(self._stations, placement, strict=True):
            for number in devices:
                device = self._devices.setdefault(
                    number, _Device(number, self._table.device.memory_bytes)
                )
                if all(server.station is not station for server in device.servers):
                    device.held_bytes += station.weights_bytes
                waiting = [] if station.keeps else station.waiting
                server = _Server(station, device, len(station.servers), waiting)
                station.servers.append(server)
                device.servers.append(server)
        for device in self._devices.values():
            if any(server.station.keeps for server in device.servers):
                device.reserved_bytes = max(
                    server.station.batch_max
                    * max(server.station.transient_bytes, server.station.head_bytes)
                    for server in device.servers
                )
            if device.room() < 0:
                taken = device.memory_bytes - device.room()
                raise InvalidInput(
                    f"the weights and the largest batch of device {device.number} take "
                    f"{taken / 1e9:.1f} GB; it has {device.memory_bytes / 1e9:.1f} GB",
                    hint="place fewer replicas on it",
                )
            device.kv_room = device.room()
            device.take()

    def _go_on(self, batch: Sequence[_Pass]) -> None:
        """Have a batch wait at the station that is next on its route, whose servers take it once
        they can.
        """
        station = self._stations[self._route[batch[0].step]]
        for one in batch:
            if station.keeps and one.home is None:
                self._settle(station, one)
            queue = station.waiting if one.home is None or not station.keeps else one.home.waiting
            heappush(queue, (one.began_s, one.number, one))
        self._serve(station)

    def _settle(self, station: _Station, one: _Pass) -> None:
        """Give a sequence the server that keeps its KV cache, if one has the memory for it now."""
        size = station.kv_bytes_per_token * one.request.tokens
        room = [
            server
            for server in station.servers
            if size <= min(server.device.room(), server.device.work_room())
        ]
        if room:
            one.home = min(room, key=lambda server: (server.homes, server.number))
            one.home.homes += 1
            one.home.device.take(kept=size)
        elif size > (most := max(server.device.kv_room for server in station.servers)):
            raise self._too_large(size, most)

    def _settle_oldest(self, station: _Station) -> None:
        """Give servers to the oldest sequences that wait for memory, while there is some."""
        while station.waiting:
            oldest = station.waiting[0][2]
            self._settle(station, oldest)
            if oldest.home is None:
                break
            heappush(oldest.home.waiting, heappop(station.waiting))
        self._serve(station)

    def _too_large(self, size: int, room: int) -> InvalidInput:
        return InvalidInput(
            f"one request of {self._table.model} takes {size / 1e9:.2f} GB beside the weights; a "
            f"device has {room / 1e9:.2f} GB for it",
            hint="divide the model over more devices, or plan for shorter prompts",
        )

    def _serve(self, station: _Station) -> None:
        """Give servers without work what waits, where their device has a lane free."""
        if station.keeps:
            for keeper in station.servers:
                if keeper.waiting and self._free(keeper):
                    self._start(keeper)
            return
        while station.waiting and (server := self._freest(station)) is not None:
            self._start(server)

    def _freest(self, station: _Station) -> _Server | None:
        """The server, of those without work, whose device has the least to do now, then the one
        where the data is, then the one that did least: an operator on every device would else hold
        up those that only some have.
        """
        data = station.waiting[0][2].device
        return min(
            filter(self._free, station.servers),
            key=lambda server: (
                len(server.device.active),
                server.device is not data,
                server.device.admitted_s,
            ),
            default=None,
        )

    def _free(self, server: _Server) -> bool:
        """Whether it can begin with the oldest of those that wait."""
        device = server.device
        if server.batch or len(device.active) + device.receiving >= self._lanes:
            return False
        size = server.station.size(server.waiting[0][2])
        if size <= device.work_room():
            return True
        if not device.active and not device.receiving:
            raise self._too_large(size, device.work_room())
        return False

    def _give_lanes(self, device: _Device) -> None:
        """Give a device's lanes that are free to the oldest that waits for one of its servers."""
        while len(device.active) + device.receiving < self._lanes:
            oldest: tuple[float, int] = (math.inf, 0)
            for server in device.servers:
                queue = server.waiting
                if queue and queue[0][:2] < oldest and self._free(server):
                    oldest, chosen = queue[0][:2], server
            if oldest[0] == math.inf:
                return
            self._start(chosen)

    def _start(self, server: _Server) -> None:
        """Take a batch that the device has the memory for, fetch the rows that are elsewhere, and
        begin when they are there.
        """
        station, device, waiting = server.station, server.device, server.waiting
        others = []
        room = device.work_room()
        while waiting and len(server.batch) < station.batch_max:
            first = heappop(waiting)
            # Layers have weights of their own: only what is at the same one goes together.
            fits = station.size(first[2]) <= room - server.work_bytes
            if (server.batch and first[2].step != server.batch[0].step) or not fits:
                others.append(first)
            else:
                server.batch.append(first[2])
                server.work_bytes += station.size(first[2])
        for first in others:
            heappush(waiting, first)
        device.take(work=server.work_bytes)
        arrived_s = self._clock.now_s()
        before = self._stations[self._route[server.batch[0].step - 1]]
        for source in dict.fromkeys(one.device for one in server.batch):
            if source is not None and source is not device:
                size = sum(before.handed_on(one) for one in server.batch if one.device is source)
                arrived_s = max(arrived_s, self._transfer(source, size, before.hops))
        device.receiving += 1
        if arrived_s > self._clock.now_s():
            self._clock.call_at(arrived_s, partial(self._compute, server))
        else:
            self._compute(server)

    def _transfer(self, source: _Device, size: int, hops: float) -> float:
        """The time at which data has arrived that leaves a device now, in so many pieces."""
        device = self._table.device
        source.link_free_s = (
            max(source.link_free_s, self._clock.now_s())
            + hops * device.link_latency_s
            + size / device.link_bytes_per_s
        )
        self._moved_bytes += size
        return source.link_free_s

    def _compute(self, server: _Server) -> None:
        lengths = sorted(one.request.tokens for one in server.batch)
        work_s, device = server.station.seconds(tuple(lengths)), server.device
        device.receiving -= 1
        device.advance(self._clock.now_s())
        server.left_s = server.work_s = work_s
        server.size = len(lengths) if server.station.decodes else sum(lengths)
        device.admitted_s += work_s
        device.active.append(server)
        self._await(device)

    def _await(self, device: _Device) -> None:
        """Come back when the next server of a device is done, unless its work changes before. What
        it does in a second is by the curve of its largest batch at work.
        """
        device.version += 1
        if not device.active:
            return
        index = bisect_right(self._sizes, max(server.size for server in device.active)) - 1
        yields_s = self._yields[max(index, 0)][min(len(device.active), LANES_MAX)]
        device.speed_s = yields_s / len(device.active)
        least_s = min(server.left_s for server in device.active)
        self._clock.call_at(
            self._clock.now_s() + max(least_s, 0.0) / device.speed_s,
            partial(self._due, device, device.version),
        )

    def _due(self, device: _Device, version: int) -> None:
        """End the servers that are due. Raises AssertionError where one has work left."""
        if version != device.version:
            return
        device.advance(self._clock.now_s())
        least_s = min(server.left_s for server in device.active)
        done = [server for server in device.active if server.left_s <= max(least_s, 0.0) + 1e-15]
        for server in done:
            off_s = abs(server.left_s)
            assert off_s <= CONSERVED * max(server.work_s, 1.0), (
                f"device {device.number}: a server is due {server.left_s} s early"
            )
            device.active.remove(server)
            device.take(work=-server.work_bytes)
            server.work_bytes = 0
        self._await(device)
        for server in done:
            batch, server.batch = server.batch, []
            for one in batch:
                one.step += 1
                one.device = device
            if batch[0].step == len(self._route):
                batch = self._pass_over(batch)
            if batch:
                self._go_on(batch)
        for station in self._stations:
            if station.keeps and station.waiting:
                self._settle_oldest(station)
        self._give_lanes(device)

    def _pass_over(self, ones: Sequence[_Pass]) -> list[_Pass]:
        """End an iteration of these requests. Returns those that want another token."""
        now_s = self._clock.now_s()
        for one in ones:
            one.spent_s += now_s - one.began_s
            one.began_s, one.step, one.left = now_s, 0, one.left - 1
            if not one.left:
                self._over(one)
        return [one for one in ones if one.left]

    def _over(self, one: _Pass) -> None:
        self._ended += 1
        if one.home is not None:
            kept = one.home.station.kv_bytes_per_token * one.request.tokens
            one.home.homes -= 1
            one.home.device.take(kept=-kept)
        if one.number < self._warm:
            return
        mean_s = one.spent_s / one.request.passes
        self._means_s.append(mean_s)
        self._misses += mean_s > self._slo_s

    def _result(self, wanted: int) -> Executed:
        now_s = self._clock.now_s()
        devices = list(self._devices.values())
        for device in devices:
            device.advance(now_s)
            most_s = max(yields[-1] for yields in self._yields) * device.busy_s
            assert device.done_s <= most_s + CONSERVED, f"device {device.number} did too much"
        group, counted = self._table.devices, len(self._means_s)
        busy_s = sum(device.busy_s for device in devices)
        return Executed(
            met=1 - (self._misses + max(wanted - counted, 0)) / wanted,
            mean_s=sum(self._means_s) / counted if counted else float("inf"),
            requests=self._ended,
            device_s=sum(device.done_s for device in devices),
            busy_s=busy_s,
            energy_j=group * self._table.device.power.joules(len(devices) * now_s, busy_s),
            memory_bytes=group * sum(device.peak_bytes for device in devices),
            moved_bytes=self._moved_bytes,
        )


def poisson(
    rate_per_s: float, lengths: Sequence[int], count: int, seed: int, passes: int = 1
) -> list[Request]:
    """Draw so many requests of a Poisson process, with equally likely lengths."""
    draw = random.Random(seed)
    at_s = 0.0
    found = []
    for _ in range(count):
        at_s += draw.expovariate(rate_per_s)
        found.append(Request(at_s=at_s, tokens=draw.choice(lengths), passes=passes))
    return found
