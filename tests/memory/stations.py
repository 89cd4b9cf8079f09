"""A reservation station that is held to its rules at every call.

`CheckedStation` keeps its own plain record of every instance and adds everything up anew after each
call. It does not foretell what starts: it checks that each start was allowed, that nothing more
urgent could have gone first, and that nothing waits that could run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mesh.domain.ids import InstanceId
from mesh.domain.model import NOTHING, Size
from mesh.memory import station as station_module
from mesh.memory.shared_weights import SharedWeights
from mesh.memory.station import Reservation, ReservationKind, ReservationStation

LOAD, WAKE, RESIZE, UNLOAD = (
    ReservationKind.LOAD,
    ReservationKind.WAKE,
    ReservationKind.RESIZE,
    ReservationKind.UNLOAD,
)
Started = tuple[Reservation, ...]
NO_SHARES: Mapping[str, SharedWeights] = {}


@dataclass(slots=True, kw_only=True, eq=False)
class Known:
    """What is known of one instance."""

    size: Size = NOTHING
    running: Reservation | None = None
    waiting: Reservation | None = None
    overtaken: int = 0
    share: SharedWeights | None = None

    @property
    def size_bytes(self) -> int:
        return self.size.bytes

    @property
    def tracked_bytes(self) -> int:
        return max(self.size_bytes, self.running.size_bytes) if self.running else self.size_bytes

    @property
    def promised_bytes(self) -> int:
        last = self.waiting or self.running
        return last.size_bytes if last else self.size_bytes


def sized(size_bytes: int, share: SharedWeights | None) -> Size:
    """The weights of an instance are what it shares, and it holds no less than that."""
    weights_bytes = share.size_bytes if share and size_bytes else 0
    return Size(weights_bytes, max(size_bytes - weights_bytes, 0))


class CheckedStation:
    """Takes plain names; answers what starts as `resize a 50`, or None for a refusal."""

    def __init__(
        self,
        capacity_bytes: int = 100,
        shares: Mapping[str, SharedWeights] = NO_SHARES,
        /,
        **held_bytes: int,
    ) -> None:
        """`shares`: of those instances that share."""
        self.station = ReservationStation(capacity_bytes=capacity_bytes)
        self.shares = shares
        self.known: dict[InstanceId, Known] = {}
        self.issued = 0
        self.started: set[int] = set()
        """Sequences."""
        self.calls: list[tuple[str, tuple[object, ...], Started | None]] = []
        self.seen: Counter[str] = Counter()
        for name, size_bytes in held_bytes.items():
            self.record(name, size_bytes)

    @property
    def promised_bytes(self) -> int:
        return _once((known.promised_bytes, known.share) for known in self.known.values())

    @property
    def tracked_bytes(self) -> int:
        return _once((known.tracked_bytes, known.share) for known in self.known.values())

    def freed_bytes(self, names: Iterable[str], beside: SharedWeights | None = None) -> int:
        """By adding up what is left without them."""
        comes = [] if beside is None else [(beside.size_bytes, beside)]
        sizes = {name: (known.promised_bytes, known.share) for name, known in self.known.items()}
        before = _once([*sizes.values(), *comes])
        going = set(names)
        return before - _once([*(of for name, of in sizes.items() if name not in going), *comes])

    def grows_bytes(self, known: Known) -> int:
        """What the waiting one of an instance that runs none would take."""
        if known.waiting is None:
            return 0
        others = [(k.tracked_bytes, k.share) for k in self.known.values() if k is not known]
        size_bytes = max(known.waiting.size_bytes, known.size_bytes)
        return _once([*others, (size_bytes, known.share)]) - self.tracked_bytes

    def is_within(self) -> bool:
        return max(self.promised_bytes, self.tracked_bytes) <= self.station.capacity_bytes

    def waiting(self) -> list[str]:
        return _said(self.station.waiting())

    def running(self) -> list[str]:
        """Names."""
        return [name for name, known in self.known.items() if known.running is not None]

    def load(self, name: str, size_bytes: int, by_s: float = 0.0) -> list[str] | None:
        return self.issue(LOAD, name, size_bytes, by_s)

    def wake(self, name: str, size_bytes: int, by_s: float = 0.0) -> list[str] | None:
        return self.issue(WAKE, name, size_bytes, by_s)

    def resize(self, name: str, size_bytes: int, by_s: float = 0.0) -> list[str] | None:
        return self.issue(RESIZE, name, size_bytes, by_s)

    def unload(self, name: str, by_s: float = 0.0) -> list[str] | None:
        return self.issue(UNLOAD, name, 0, by_s)

    def issue(
        self, kind: ReservationKind, name: str, size_bytes: int, by_s: float = 0.0
    ) -> list[str] | None:
        instance_id = InstanceId(name)
        share = self.shares.get(name)
        known = self.known.get(instance_id, Known(share=share))
        size = sized(size_bytes, known.share)
        size_bytes = size.bytes
        others = [(k.promised_bytes, k.share) for k in self.known.values() if k is not known]
        promised_bytes = _once([*others, (size_bytes, known.share)])
        fits = promised_bytes <= max(self.promised_bytes, self.station.capacity_bytes)
        assert self.station.fits(instance_id, size, share) == fits
        started = self.station.issue(kind, instance_id, size, by_s, share)
        self.calls.append(("issue", (kind, instance_id, size, by_s, share), started))
        assert (started is not None) == fits
        if started is None:
            self.seen["refused"] += 1
            self._check_books()
            return None
        self.issued += 1
        if known.waiting is not None:
            self.seen["replaced"] += 1
            if known.waiting.kind in station_module.LOADS and kind is RESIZE:
                kind = known.waiting.kind
        known.waiting = Reservation(
            sequence=self.issued,
            kind=kind,
            instance_id=instance_id,
            size=size,
            deadline_s=by_s,
        )
        self.known[instance_id] = known
        return self._check(started)

    def done(
        self, name: str, size_bytes: int | None = None, share: SharedWeights | None = None
    ) -> list[str]:
        """With the size that the reservation wants, unless another is given."""
        instance_id = InstanceId(name)
        known = self.known.get(instance_id, Known())
        if size_bytes is None:
            assert known.running is not None
            size_bytes = known.running.size_bytes
        known.share = share or known.share
        size = sized(size_bytes, known.share)
        started = self.station.done(instance_id, size, share)
        self.calls.append(("done", (instance_id, size, share), started))
        known.size, known.running = size, None
        if not size_bytes:
            self.known.pop(instance_id, None)
        return self._check(started)

    def fail(self, name: str) -> list[str]:
        """The reservation that runs ends with the size that the instance had."""
        return self.done(name, self.known[InstanceId(name)].size_bytes)

    def cancel(self, name: str) -> list[str]:
        started = self.station.cancel(InstanceId(name))
        self.calls.append(("cancel", (InstanceId(name),), started))
        known = self.known.get(InstanceId(name), Known())
        kept = known.running.size_bytes if known.running else known.size_bytes
        if known.waiting and known.waiting.size_bytes > kept:
            self.seen["cancelled"] += 1
            known.waiting, known.overtaken = None, 0
        return self._check(started)

    def forget(self, name: str) -> list[str]:
        started = self.station.forget(InstanceId(name))
        self.calls.append(("forget", (InstanceId(name),), started))
        self.known.pop(InstanceId(name), None)
        return self._check(started)

    def record(self, name: str, size_bytes: int) -> list[str]:
        is_new = name not in self.known
        share = self.shares.get(name)
        size = sized(size_bytes, share)
        started = self.station.record(InstanceId(name), size, share)
        self.calls.append(("record", (InstanceId(name), size, share), started))
        known = self.known.setdefault(InstanceId(name), Known(share=share))
        known.size, known.share = size, share or known.share
        assert not (is_new and started)
        return self._check(started)

    def complete_all(self) -> int:
        """Everything that runs now is done; how many."""
        running = self.running()
        for name in running:
            self.done(name)
        return len(running)

    def check_replay(self) -> None:
        """The same calls have the same answers."""
        again = ReservationStation(capacity_bytes=self.station.capacity_bytes)
        for method, arguments, answer in self.calls:
            assert getattr(again, method)(*arguments) == answer

    def _check(self, started: Started) -> list[str]:
        for reservation in started:
            known = self.known[reservation.instance_id]
            assert known.waiting == reservation, "issued last, and not started yet"
            assert reservation.sequence not in self.started
            assert self._could_start(known)
            grows_bytes = self.grows_bytes(known)
            for earlier in self._more_urgent(known):
                assert not self._could_start(earlier), "the more urgent one goes first"
                if grows_bytes:
                    earlier.overtaken += 1
            known.running, known.waiting, known.overtaken = reservation, None, 0
            self.started.add(reservation.sequence)
        assert not [known for known in self.known.values() if self._could_start(known)]
        self._check_books()
        return _said(started)

    def _could_start(self, known: Known) -> bool:
        if known.waiting is None or known.running is not None or self._waits_for_a_load(known):
            return False
        grows_bytes = self.grows_bytes(known)
        if not grows_bytes:
            return True
        if self.tracked_bytes + grows_bytes > self.station.capacity_bytes:
            return False
        limit = station_module.OVERTAKEN_MAX
        return all(earlier.overtaken < limit for earlier in self._more_urgent(known))

    def _more_urgent(self, than: Known) -> Iterator[Known]:
        """Those that wait for memory and are needed before."""
        assert than.waiting is not None
        bound = _urgency(than.waiting)
        for known in self.known.values():
            if known.waiting is None or known.running or self._waits_for_a_load(known):
                continue
            if _urgency(known.waiting) < bound:
                yield known

    def _waits_for_a_load(self, known: Known) -> bool:
        """Whether it loads, and another one loads from the same place."""
        assert known.waiting is not None
        kind = known.waiting.kind
        others = (other.running for other in self.known.values())
        loading = any(running is not None and running.kind is kind for running in others)
        return loading and kind in station_module.LOADS

    def _check_books(self) -> None:
        station = self.station
        assert station.promised_bytes == self.promised_bytes
        assert station.tracked_bytes == self.tracked_bytes
        kv_bytes = (sized(k.promised_bytes, k.share).kv_bytes for k in self.known.values())
        assert station.promised.kv_bytes == sum(kv_bytes)
        assert station.free_bytes + station.promised_bytes == station.capacity_bytes
        waiting = [known.waiting for known in self.known.values() if known.waiting is not None]
        assert station.waiting() == tuple(sorted(waiting, key=_urgency))
        names = sorted(self.known)[::2]
        for beside in (None, next(iter(self.shares.values()), None)):
            assert station.freed_bytes(names, beside) == self.freed_bytes(names, beside)
        for instance_id, known in self.known.items():
            assert station.size(instance_id).bytes == known.promised_bytes
            assert station.running(instance_id) == known.running


def _once(sizes: Iterable[tuple[int, SharedWeights | None]]) -> int:
    """The sum of the sizes, in which what is shared counts once: at the most that one instance has
    of it.
    """
    total, shared = 0, dict[object, int]()
    for size_bytes, share in sizes:
        total += max(size_bytes - share.size_bytes, 0) if share else size_bytes
        if share:
            most = max(shared.get(share.key, 0), min(share.size_bytes, size_bytes))
            shared[share.key] = most
    return total + sum(shared.values())


def _urgency(reservation: Reservation) -> tuple[float, int]:
    return reservation.deadline_s, reservation.sequence


def _said(reservations: Iterable[Reservation]) -> list[str]:
    return [f"{r.kind} {r.instance_id} {r.size_bytes}" for r in reservations]
