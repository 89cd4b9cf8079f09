"""Random walks over a reservation station: whatever is issued, done, failed, forgotten or reported,
in whatever order, its books hold, and everything that waits starts in the end.

`MESH_STATION_WALKS` says how many walks of up to STEPS calls; 1500 make more than 50,000 calls, in
about 20 s of CPU time.
"""

import os
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mesh.domain.ids import InstanceId
from mesh.memory import station as station_module
from mesh.memory.shares import Share
from tests.memory.stations import RESIZE, UNLOAD, CheckedStation, sized

WALKS = int(os.environ.get("MESH_STATION_WALKS") or (500 if "CI" in os.environ else 150))
STEPS = 50
CAPACITY = 24
NAMES = tuple(InstanceId(f"i{n}") for n in range(8))
NAME = st.sampled_from(NAMES)
PICK = st.integers(0, len(NAMES) - 1)
SIZE = st.integers(0, 9)
CROWDED = (12, 1, 1, 1, 1, 1, 1)
"""The first shrinks, the second waits for it, and what the others ask for may overtake it."""
STARTS = (CROWDED, (), (8, 5, 4, 3, 1), CROWDED)
SHARES: tuple[Mapping[str, Share], ...] = (
    {},
    {name: Share(key=n % 2, size_bytes=3 + n % 3) for n, name in enumerate(NAMES[:6])},
)
"""Two models of which three instances each share weights, which are said to be of several sizes."""
SEEN: Counter[str] = Counter()
"""Over all walks."""


class Walk(RuleBasedStateMachine):
    """One node. An honest one never has more than was promised of it."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = CheckedStation(CAPACITY)
        self.honest = True

    @initialize(
        honest=st.booleans(),
        held=st.sampled_from(STARTS),
        overtaken_max=st.integers(1, 2),
        shares=st.sampled_from(SHARES),
    )
    def begin(
        self,
        honest: bool,
        held: tuple[int, ...],
        overtaken_max: int,
        shares: Mapping[str, Share],
    ) -> None:
        self.honest = honest
        self.checked = CheckedStation(CAPACITY, shares)
        station_module.OVERTAKEN_MAX = overtaken_max
        for name, size in zip(NAMES, held, strict=False):
            self.checked.record(name, size)
        if held is CROWDED:
            self.checked.resize(NAMES[0], 2)
            self.checked.resize(NAMES[1], 9, by_s=1.0)

    @rule(name=NAME, size=SIZE, by=st.integers(0, 3))
    def aim(self, name: InstanceId, size: int, by: int) -> None:
        self.issue(name, size, by)

    @precondition(lambda self: self.shrinkable())
    @rule(pick=PICK, less=st.integers(1, 8))
    def shrink(self, pick: int, less: int) -> None:
        names = self.shrinkable()
        name = names[pick % len(names)]
        self.issue(name, max(self.checked.station.size(name).bytes - less, 1), 0)

    @precondition(lambda self: self.checked.station.free_bytes > 0)
    @rule(name=NAME, more=st.integers(1, 8), by=st.integers(0, 3), at_once=st.booleans())
    def grow(self, name: InstanceId, more: int, by: int, at_once: bool) -> None:
        """As far as the promise goes."""
        more = min(more, self.checked.station.free_bytes)
        self.issue(name, self.checked.station.size(name).bytes + more, by)
        if at_once and name in self.checked.running():
            self.checked.done(name)
            self.count()

    @precondition(lambda self: self.checked.running())
    @rule(pick=PICK)
    def done(self, pick: int) -> None:
        running = self.checked.running()
        self.checked.done(running[pick % len(running)])
        self.count()

    @precondition(lambda self: self.checked.running())
    @rule(pick=PICK, left=SIZE)
    def fail(self, pick: int, left: int) -> None:
        """An honest shrink does not fail, and an honest growth ends within its bounds."""
        running = self.checked.running()
        name = InstanceId(running[pick % len(running)])
        known = self.checked.known[name]
        assert known.running is not None
        if self.honest:
            left = max(left, known.size_bytes)
            left = min(left, known.running.size_bytes)
        self.checked.done(name, left)
        self.count()

    @precondition(lambda self: self.checked.waiting())
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        """Cancels a reservation, mostly one that waits."""
        waiting = [
            name for name in NAMES if (known := self.checked.known.get(name)) and known.waiting
        ]
        self.checked.cancel(waiting[pick] if pick < len(waiting) else NAMES[pick])
        self.count()

    @precondition(lambda self: len(self.checked.known) == len(NAMES))
    @rule(name=NAME)
    def forget(self, name: InstanceId) -> None:
        self.checked.forget(name)
        self.count()

    @precondition(lambda self: len(self.checked.known) < len(NAMES) or not self.honest)
    @rule(name=NAME, size=SIZE)
    def record(self, name: InstanceId, size: int) -> None:
        """An honest node only reports instances that are new, and that fit."""
        if self.honest:
            share = self.checked.shares.get(name)
            size = sized(size, share).bytes
            free = CAPACITY - max(self.checked.tracked_bytes, self.checked.promised_bytes)
            if name in self.checked.known or size > free:
                return
        self.checked.record(name, size)
        self.count()

    def shrinkable(self) -> list[InstanceId]:
        return [name for name in self.checked.known if self.checked.station.size(name).bytes > 1]

    def issue(self, name: InstanceId, size: int, by: int) -> None:
        known = name in self.checked.known
        loads = station_module.LOADS
        kind = loads[NAMES.index(name) % len(loads)]
        kind = UNLOAD if not size else RESIZE if known else kind
        self.checked.issue(kind, name, size, float(by))
        self.count()

    def count(self) -> None:
        SEEN["calls"] += 1
        within = self.checked.is_within()
        SEEN["beyond"] += not within
        assert within or not self.honest

    def settle(self) -> None:
        """Within the promise, nothing waits once all that runs has been done twice over, and once
        more for each load, for they follow one another.
        """
        loads = sum(r.kind in station_module.LOADS for r in self.checked.station.waiting())
        for _ in range(2 + loads):
            SEEN["completions"] += self.checked.complete_all()
        if self.checked.promised_bytes <= CAPACITY:
            assert not self.checked.waiting()

    def teardown(self) -> None:
        self.settle()
        while self.checked.promised_bytes > CAPACITY:
            assert not self.honest
            sizes = {n: k.promised_bytes for n, k in self.checked.known.items()}
            self.checked.unload(max(NAMES, key=lambda name: sizes.get(name, 0)))
            SEEN["recovered"] += 1
        self.settle()
        assert not self.checked.waiting()
        self.checked.complete_all()
        assert self.checked.tracked_bytes == self.checked.promised_bytes <= CAPACITY
        self.checked.check_replay()
        SEEN.update(self.checked.seen)


def test_random_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk sets how often one may be overtaken: rarely, so that walks get there."""
    monkeypatch.setattr(station_module, "OVERTAKEN_MAX", 1)
    SEEN.clear()
    run_state_machine_as_test(
        Walk, settings=settings(max_examples=WALKS, stateful_step_count=STEPS)
    )
    assert SEEN["calls"] > WALKS * STEPS // 4, SEEN
    assert (
        min(SEEN["refused"], SEEN["replaced"], SEEN["cancelled"], SEEN["beyond"]) > WALKS // 10
    ), SEEN
