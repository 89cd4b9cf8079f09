"""The reservation station of one node: which loads, resizes and unloads are promised, and may run.

After Tomasulo, as LLM-Mesh §6.3 has it. Two accounts of the same memory: *promised*, what every
instance will hold once all that was issued is done, and *tracked*, what instances may hold at this
moment: one that shrinks counts with its old size, one that grows with its new one. A reservation
that takes memory is issued only if the promise fits, and runs only if what is tracked fits; until
then it waits here. The reservations of one instance follow each other. Those of different ones wake
out of order, the earliest deadline first; one that does not fit yet may be overtaken, but not
forever. Loads share a disk or a bus, so that one runs at a time, and beside it one wake, a load of
weights that are in the host's memory, and one import, a load whose model has to be brought first.
Weights and KV caches are booked apart. What instances share of their weights counts once
(`shared_weights`): the first that is promised it takes it, the last that leaves gives it back.
Where a node swaps weights by itself all of them are booked once, as a pool: the two largest have
to fit beside the KV caches, one that computes and one that is on its way.

The controller core is the only writer. What comes back from a call is to be started now.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import field
from enum import StrEnum
from heapq import heappop, heappush, nlargest

from mesh.domain.ids import InstanceId
from mesh.domain.model import NOTHING, Size
from mesh.domain.values import dataclass, replace
from mesh.memory.shared_weights import SharedWeights

OVERTAKEN_MAX = 8
"""Reservations that may start before one that has the earlier deadline and does not fit yet."""


class ReservationKind(StrEnum):
    LOAD = "load"
    WAKE = "wake"
    IMPORT = "import"
    RESIZE = "resize"
    UNLOAD = "unload"


LOADS = (ReservationKind.LOAD, ReservationKind.WAKE, ReservationKind.IMPORT)
"""The kinds of loads; one load of each kind runs at a time."""

NEWCOMER = InstanceId("newcomer")
"""The name of a load that a forecast adds. No instance is called so: their names end in numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A load, resize or unload: what its instance is to hold once it is done, weights included,
    also those that it shares.
    """

    sequence: int
    kind: ReservationKind
    instance_id: InstanceId
    size: Size
    deadline_s: float
    """When it is needed."""

    @property
    def size_bytes(self) -> int:
        return self.size.bytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Holding:
    """One instance: what it holds, what is under way, and what is to follow."""

    size: Size = NOTHING
    shared: SharedWeights | None = None
    """What the instance shares of its weights, and of those that it is promised."""
    running: Reservation | None = None
    waiting: Reservation | None = None
    overtaken: int = 0
    """How often the waiting reservation, or one whose place it took, has been overtaken: newer
    targets would otherwise starve.
    """

    @property
    def tracked(self) -> Size:
        return self.size.most(self.running.size) if self.running else self.size

    @property
    def promised(self) -> Size:
        last = self.waiting or self.running
        return last.size if last else self.size

    def shared_bytes(self, size: Size) -> int:
        """How much would be shared if the instance held this much."""
        return min(self.shared.size_bytes, size.weights_bytes) if self.shared is not None else 0


def _promised(holding: _Holding) -> Size:
    return holding.promised


def _tracked(holding: _Holding) -> Size:
    return holding.tracked


@dataclass(slots=True, kw_only=True, eq=False)
class ReservationStation:
    """Invariants: promised and tracked bytes stay within the capacity, unless a node reports more
    than was promised of it (`record`, or `done` of a shrink that failed) or has less for instances
    than it said (`limit`); a reservation starts once at most; what waits starts as soon as what
    runs has freed enough for it, and a load when no other of its kind runs. Within the promise,
    nothing but loads waits any more once all that runs has been done twice over.
    """

    capacity_bytes: int
    pools: bool = False
    """Its node swaps weights, of which it has a pool: what the KV caches leave of the capacity."""
    promised: Size = NOTHING
    tracked: Size = NOTHING
    _holdings: dict[InstanceId, _Holding] = field(default_factory=dict)
    _sequence: int = 0

    @property
    def promised_bytes(self) -> int:
        return self.promised.bytes

    @property
    def tracked_bytes(self) -> int:
        return self.tracked.bytes

    @property
    def free_bytes(self) -> int:
        """What can be promised."""
        weights_bytes, kv_bytes = self.promised
        return self.capacity_bytes - weights_bytes - kv_bytes

    def limit(self, capacity_bytes: int) -> None:
        """The node has less for instances than was thought, perhaps less than is promised."""
        self.capacity_bytes = capacity_bytes

    def spared_bytes(self, shared: SharedWeights) -> int:
        """How much an instance with these weights would not take, because it is promised to others
        already. Of a pool: its weights but for what the pool grows by.
        """
        if self.pools:
            weights = Size(shared.size_bytes)
            return shared.size_bytes - self._more(_Holding(), _promised, NOTHING, weights).bytes
        return min(self._account_bytes(_Holding(shared=shared), _promised), shared.size_bytes)

    def freed_bytes(
        self, instance_ids: Collection[InstanceId], beside: SharedWeights | None = None
    ) -> int:
        """What can be promised more once all of these have gone, `beside` one that comes with that
        share: what instances share stays with the last of them.
        """
        going = [h for i in instance_ids if (h := self._holdings.get(i)) is not None]
        if self.pools:
            with_it = [beside.size_bytes] if beside is not None else []
            pools = (self._pool_bytes(with_it, _promised, gone) for gone in ((), going))
            return int(next(pools) - next(pools)) + sum(h.promised.kv_bytes for h in going)
        freed_bytes = sum(h.promised.bytes - h.shared_bytes(h.promised) for h in going)
        for key in {h.shared.key: None for h in going if h.shared is not None}:
            comes_bytes = beside.size_bytes if beside is not None and beside.key == key else 0
            all_bytes, left_bytes = [comes_bytes], [comes_bytes]
            for holding in self._sharers(key):
                shared_bytes = holding.shared_bytes(holding.promised)
                all_bytes.append(shared_bytes)
                if holding not in going:
                    left_bytes.append(shared_bytes)
            freed_bytes += max(all_bytes) - max(left_bytes)
        return freed_bytes

    def size(self, instance_id: InstanceId) -> Size:
        """What an instance will hold when all is done. An unknown one has nothing."""
        holding = self._holdings.get(instance_id)
        return holding.promised if holding else NOTHING

    def held(self, instance_id: InstanceId) -> Size:
        """What an instance may hold at this moment. An unknown one has nothing."""
        holding = self._holdings.get(instance_id)
        return holding.tracked if holding else NOTHING

    def holders(self) -> tuple[InstanceId, ...]:
        """Every instance that holds memory, or is promised some."""
        return tuple(self._holdings)

    def waiting(self) -> tuple[Reservation, ...]:
        """The reservations that are issued and not started, in the order in which they wake."""
        found = [h.waiting for h in self._holdings.values() if h.waiting is not None]
        return tuple(sorted(found, key=_urgency))

    def running(self, instance_id: InstanceId) -> Reservation | None:
        holding = self._holdings.get(instance_id)
        return holding.running if holding else None

    def load_kind(self, instance_id: InstanceId) -> ReservationKind | None:
        """The kind of the load that runs or waits."""
        holding = self._holdings.get(instance_id)
        found = (holding.running, holding.waiting) if holding else ()
        return next((r.kind for r in found if r is not None and r.kind in LOADS), None)

    def resizes(self, instance_id: InstanceId) -> tuple[Reservation, ...]:
        """The resizes of an instance that run or wait: two at most."""
        holding = self._holdings.get(instance_id)
        found = (holding.running, holding.waiting) if holding else ()
        return tuple(r for r in found if r is not None and r.kind is ReservationKind.RESIZE)

    def running_reservations(self) -> tuple[Reservation, ...]:
        """The reservations that are started and not done, by deadline."""
        found = [h.running for h in self._holdings.values() if h.running is not None]
        return tuple(sorted(found, key=_urgency))

    def is_pending(self, instance_id: InstanceId) -> bool:
        """Whether a reservation of the instance runs or waits."""
        holding = self._holdings.get(instance_id)
        return holding is not None and bool(holding.running or holding.waiting)

    def fits(
        self, instance_id: InstanceId, size: Size, shared: SharedWeights | None = None
    ) -> bool:
        """Whether a reservation that leaves the instance with so much could be issued. No more than
        it has been promised always fits, even on a node that has more than its capacity. `shared`:
        as with `issue`.
        """
        holding = self._holdings.get(instance_id) or _Holding(shared=shared)
        more = self._more(holding, _promised, holding.promised, size)
        return more.bytes <= max(self.free_bytes, 0)

    def issue(
        self,
        kind: ReservationKind,
        instance_id: InstanceId,
        size: Size,
        deadline_s: float,
        shared: SharedWeights | None = None,
    ) -> tuple[Reservation, ...] | None:
        """Promise a reservation; those that start now. None, and nothing changes, if it does not
        fit. It takes the place of one that waits for the same instance; a load that has not begun
        stays a load when it is resized. `shared`: that a new instance comes with.
        """
        if not self.fits(instance_id, size, shared):
            return None
        holding = self._holdings.setdefault(instance_id, _Holding(shared=shared))
        replaced = holding.waiting.kind if holding.waiting is not None else None
        if kind is ReservationKind.RESIZE and replaced in LOADS:
            kind = replaced
        self._sequence += 1
        reservation = Reservation(
            sequence=self._sequence,
            kind=kind,
            instance_id=instance_id,
            size=size,
            deadline_s=deadline_s,
        )
        self._count(holding, -1)
        holding.waiting = reservation
        self._count(holding, 1)
        return self._wake()

    def takes_memory(self, waiting: Reservation) -> bool:
        """Whether the promise would be less without a reservation that waits."""
        holding = self._holdings[waiting.instance_id]
        before = holding.running.size if holding.running else holding.size
        return waiting.size_bytes > before.bytes

    def cancel(self, instance_id: InstanceId) -> tuple[Reservation, ...]:
        """Take back the reservation of an instance that waits for memory. None is no error; one
        that gives memory stays, for others may have been promised that.
        """
        holding = self._holdings.get(instance_id)
        if holding is None or holding.waiting is None:
            return ()
        if not self.takes_memory(holding.waiting):
            return ()
        self._count(holding, -1)
        holding.waiting, holding.overtaken = None, 0
        self._count(holding, 1)
        return self._wake()

    def done(
        self, instance_id: InstanceId, size: Size, shared: SharedWeights | None = None
    ) -> tuple[Reservation, ...]:
        """The reservation that runs on an instance has ended, done or failed, and left it with so
        much. Nothing: it is gone, and so is what was to follow. `shared`: what a load has shown
        that it shares; None: what is known of that holds.
        """
        holding = self._holdings.get(instance_id)
        if holding is None:
            return ()
        self._set(holding, size, shared, ended=True)
        return self._wake() if size.bytes else self.forget(instance_id)

    def record(
        self, instance_id: InstanceId, size: Size, shared: SharedWeights | None = None
    ) -> tuple[Reservation, ...]:
        """Take over what a node says that an instance holds, fitting or not. Starts something only
        where a known instance turns out to hold another size. `shared`: as with `done`.
        """
        holding = self._holdings.setdefault(instance_id, _Holding())
        self._set(holding, size, shared, ended=False)
        return self._wake()

    def forget(self, instance_id: InstanceId) -> tuple[Reservation, ...]:
        """The instance is gone, whatever was under way. An unknown one is no error."""
        holding = self._holdings.get(instance_id)
        if holding is not None:
            self._count(holding, -1)
            del self._holdings[instance_id]
        return self._wake()

    def forecast(
        self,
        now_s: float,
        ends_s: Callable[[InstanceId, float], float],
        *,
        cancelled: Callable[[InstanceId], bool] = lambda _: False,
        newcomer: tuple[ReservationKind, float] | None = None,
    ) -> dict[InstanceId, float]:
        """When each load will end, those of a kind in the order in which they will run. Where
        memory may hold one up, a copy of the station is run forward, so that loads start in the
        order that `_wake` gives them.

        `ends_s` tells when the load of an instance ends if it starts at a time; for a load that
        runs the time is `now_s`. A `cancelled` load runs to its end and leaves nothing. Resizes
        and unloads are short beside a load: they take no time here, and are over before a load that
        ends at the same moment. A load that waits for memory which nothing under way will free is
        expected behind all others. The `newcomer` is one more load, `NEWCOMER`, of a kind and
        needed by a time; whoever plans it makes room for it, so that it waits for no memory.
        """
        if newcomer is None:
            for holding in self._holdings.values():
                if holding.running or holding.waiting:
                    break
            else:
                return {}
        running, waiting = self.running_reservations(), self.waiting()
        if newcomer is not None:
            kind, needed_s = newcomer
            added = Reservation(
                sequence=self._sequence + 1,
                kind=kind,
                instance_id=NEWCOMER,
                size=NOTHING,
                deadline_s=needed_s,
            )
            waiting = tuple(sorted((*waiting, added), key=_urgency))
        if not self._may_lack(waiting):
            return _in_turn(now_s, ends_s, running, waiting)
        ahead, found = self._copy(), dict[InstanceId, float]()
        under_way: list[tuple[float, bool, tuple[float, int], Reservation]] = []

        def start(at_s: float, reservations: Iterable[Reservation]) -> None:
            for started in reservations:
                loads = started.kind in LOADS
                end_s = ends_s(started.instance_id, at_s) if loads else at_s
                heappush(under_way, (end_s, loads, _urgency(started), started))

        start(now_s, running)
        if newcomer is not None:
            start(now_s, ahead.issue(kind, NEWCOMER, NOTHING, needed_s) or ())
        while under_way:
            at_s, _, _, reservation = heappop(under_way)
            name = reservation.instance_id
            if reservation.kind in LOADS:
                found[name] = at_s
            gone = reservation.kind in LOADS and cancelled(name)
            start(at_s, ahead.done(name, NOTHING if gone else reservation.size))
        last_s = max(found.values(), default=now_s)
        return found | _in_turn(last_s, ends_s, (), ahead.waiting())

    def _may_lack(self, waiting: Iterable[Reservation]) -> bool:
        """Whether memory may decide when one of these starts: all of them do not fit beside what
        runs, even if nothing is freed. What they share is counted for each of them.
        """
        most_bytes = self.tracked_bytes
        for reservation in waiting:
            most_bytes += max(reservation.size_bytes - self.held(reservation.instance_id).bytes, 0)
        return most_bytes > self.capacity_bytes and any(r.kind in LOADS for r in waiting)

    def _copy(self) -> "ReservationStation":
        """A copy that can be run forward. Holdings that have nothing to do are not changed by that
        and are the same objects.
        """
        holdings = {
            name: replace(holding) if holding.running or holding.waiting else holding
            for name, holding in self._holdings.items()
        }
        return replace(self, _holdings=holdings)

    def _set(
        self, holding: _Holding, size: Size, shared: SharedWeights | None, *, ended: bool
    ) -> None:
        """What waits keeps its promise as a whole: its KV cache gets what its weights leave of it,
        once a load has shown what these are. Where weights are pooled it keeps its KV cache: what
        they leave is the pool's.
        """
        self._count(holding, -1)
        holding.size, holding.shared = size, shared or holding.shared
        if ended:
            holding.running = None
        waiting, weights_bytes = holding.waiting, size.weights_bytes
        if waiting and weights_bytes and waiting.size.weights_bytes not in (0, weights_bytes):
            left_bytes = max(waiting.size_bytes - weights_bytes, 0)
            kv_bytes = waiting.size.kv_bytes if self.pools else left_bytes
            holding.waiting = replace(waiting, size=Size(weights_bytes, kv_bytes))
        self._count(holding, 1)

    def _account_bytes(self, holding: _Holding, account: Callable[[_Holding], Size]) -> int:
        """The most that another one has of what it shares, by one of the accounts."""
        shared = holding.shared
        if shared is None:
            return 0
        others = [h for h in self._sharers(shared.key) if h is not holding]
        return max((h.shared_bytes(account(h)) for h in others), default=0)

    def _sharers(self, key: Hashable) -> list[_Holding]:
        holdings = self._holdings.values()
        return [h for h in holdings if h.shared is not None and h.shared.key == key]

    def _pool_bytes(
        self,
        weights_bytes: Iterable[int],
        account: Callable[[_Holding], Size],
        but: Collection[_Holding],
    ) -> int:
        """The two largest of these weights and of those of all holdings `but` some."""
        others = (account(h).weights_bytes for h in self._holdings.values() if h not in but)
        return sum(nlargest(2, (*weights_bytes, *others)))

    def _more(
        self, holding: _Holding, account: Callable[[_Holding], Size], before: Size, after: Size
    ) -> Size:
        """By how much an account grows when that of one holding does."""
        more = after.plus(before, -1)
        if self.pools:
            pools = [
                self._pool_bytes([size.weights_bytes], account, (holding,))
                for size in (before, after)
            ]
            return Size(pools[1] - pools[0], more.kv_bytes)
        if holding.shared is None:
            return more
        there_bytes = self._account_bytes(holding, account)
        spared_bytes = [min(holding.shared_bytes(size), there_bytes) for size in (before, after)]
        return more.plus(Size(spared_bytes[0] - spared_bytes[1]))

    def _count(self, holding: _Holding, sign: int) -> None:
        """Enter into both accounts (1), or take out of them (-1), what it has and no other."""
        promised = self._more(holding, _promised, NOTHING, holding.promised)
        tracked = self._more(holding, _tracked, NOTHING, holding.tracked)
        self.promised = self.promised.plus(promised, sign)
        self.tracked = self.tracked.plus(tracked, sign)

    def _wake(self) -> tuple[Reservation, ...]:
        """Start what fits, by deadline; of each kind of load one. Behind one that lacks memory and
        has been overtaken often enough, nothing that takes memory starts.
        """
        started: list[Reservation] = []
        passed: list[_Holding] = []
        waiting = self.waiting()
        if not waiting:
            return ()
        running = (holding.running for holding in self._holdings.values())
        loading = {found.kind for found in running if found is not None and found.kind in LOADS}
        for reservation in waiting:
            holding = self._holdings[reservation.instance_id]
            if holding.running is not None or reservation.kind in loading:
                continue
            size = reservation.size.most(holding.size)
            grows = self._more(holding, _tracked, holding.size, size)
            if any(grows):
                held_up = any(earlier.overtaken >= OVERTAKEN_MAX for earlier in passed)
                if held_up or self.tracked_bytes + grows.bytes > self.capacity_bytes:
                    passed.append(holding)
                    continue
                for earlier in passed:
                    earlier.overtaken += 1
                self.tracked = self.tracked.plus(grows)
            holding.running, holding.waiting, holding.overtaken = reservation, None, 0
            started.append(reservation)
            if reservation.kind in LOADS:
                loading.add(reservation.kind)
                passed = [earlier for earlier in passed if not _is(reservation.kind, earlier)]
        return tuple(started)


def _in_turn(
    now_s: float,
    ends_s: Callable[[InstanceId, float], float],
    running: Iterable[Reservation],
    waiting: Iterable[Reservation],
) -> dict[InstanceId, float]:
    """When loads end that memory does not hold up: those of a kind follow each other."""
    found: dict[InstanceId, float] = {}
    last_s = dict.fromkeys(LOADS, now_s)
    for load in (*running, *waiting):
        if load.kind in LOADS:
            name = load.instance_id
            found[name] = last_s[load.kind] = ends_s(name, last_s[load.kind])
    return found


def _is(kind: ReservationKind, holding: _Holding) -> bool:
    """Whether what waits is of this kind."""
    return holding.waiting is not None and holding.waiting.kind is kind


def _urgency(reservation: Reservation) -> tuple[float, int]:
    return reservation.deadline_s, reservation.sequence
