"""The reservation station: what is promised, what is held, by cases and by random walks."""

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
from mesh.domain.model import NOTHING, Footprint, Size
from mesh.memory import station as station_module
from mesh.memory.shared_weights import SharedWeights, counted_once
from mesh.memory.station import OVERTAKEN_MAX, ReservationKind, ReservationStation
from tests.memory.stations import RESIZE, UNLOAD, CheckedStation, sized
from tests.support.depth import DEEP


def shrinking(**held_bytes: int) -> CheckedStation:
    """A full node whose instance `s` shrinks from 60 to 20 bytes: 40 are promised, not yet free."""
    node = CheckedStation(s=60, **held_bytes)
    assert node.resize("s", 20) == ["resize s 20"]
    return node


def test_a_shrink_lowers_the_promise_and_starts_at_once() -> None:
    node = CheckedStation(a=60, b=40)
    assert node.resize("a", 20) == ["resize a 20"]
    assert (node.station.promised_bytes, node.station.tracked_bytes) == (60, 100)
    assert node.station.size(InstanceId("a")).bytes == 20
    assert node.done("a") == []
    assert node.station.tracked_bytes == 60


def test_a_growth_into_free_memory_starts_at_once_and_is_tracked_from_then_on() -> None:
    node = CheckedStation(a=20)
    assert node.resize("a", 70) == ["resize a 70"]
    assert (node.station.promised_bytes, node.station.tracked_bytes) == (70, 70)
    assert node.load("b", 30) == ["load b 30"]
    assert node.station.free_bytes == 0


def test_a_growth_that_fits_the_promise_waits_for_the_shrink_that_makes_room() -> None:
    node = shrinking(b=40)
    assert node.resize("b", 80) == []
    assert node.waiting() == ["resize b 80"]
    assert node.station.promised_bytes == 100
    assert node.done("s") == ["resize b 80"]
    assert node.waiting() == []


def test_a_load_waits_until_the_instance_in_its_place_is_gone() -> None:
    node = CheckedStation(a=60, b=40)
    assert node.unload("a") == ["unload a 0"]
    assert node.load("c", 60) == []
    assert node.done("a") == ["load c 60"]
    assert node.station.size(InstanceId("a")).bytes == 0


def test_one_completion_starts_all_that_fits() -> None:
    node = shrinking(b=20, c=20)
    assert node.resize("b", 40, by_s=2) == node.resize("c", 40, by_s=1) == []
    assert node.done("s") == ["resize c 40", "resize b 40"]


@pytest.mark.parametrize("name", ["b", "unknown"])
def test_what_does_not_fit_the_promise_changes_nothing(name: str) -> None:
    node = CheckedStation(a=60, b=30)
    before = node.station.promised_bytes, node.station.tracked_bytes
    assert node.resize(name, node.station.size(InstanceId(name)).bytes + 11) is None
    assert before == (node.station.promised_bytes, node.station.tracked_bytes)
    assert node.waiting() == node.running() == []
    assert node.resize(name, node.station.size(InstanceId(name)).bytes + 10)


def test_a_newer_target_takes_the_place_of_one_that_waits() -> None:
    node = shrinking(b=40)
    assert node.resize("b", 80, by_s=2) == []
    assert node.resize("b", 70, by_s=1) == []
    assert node.waiting() == ["resize b 70"]
    assert node.station.promised_bytes == 90, "the promise follows"
    assert node.done("s") == ["resize b 70"]
    assert node.done("b") == [], "the older target never starts"


def test_a_newer_target_of_an_instance_may_use_what_the_older_was_promised() -> None:
    node = shrinking(b=40)
    assert node.resize("b", 80) == []
    assert node.resize("b", 81) is None
    assert node.waiting() == ["resize b 80"], "refused, the older one stays"
    assert node.resize("b", 80) == []


def test_a_newer_target_that_shrinks_after_all_starts_at_once() -> None:
    node = shrinking(b=40)
    assert node.resize("b", 80) == []
    assert node.resize("b", 30) == ["resize b 30"]


def test_of_loads_and_of_wakes_one_runs_at_a_time_beside_each_other() -> None:
    node = CheckedStation(100)
    assert node.load("a", 10) == ["load a 10"]
    assert node.load("b", 10) == []
    assert node.wake("c", 10) == ["wake c 10"]
    assert node.wake("d", 10) == []
    assert node.resize("d", 20) == []
    assert node.done("c") == ["wake d 20"], "a wake that has not begun stays a wake"
    assert node.done("a") == ["load b 10"]


def test_a_load_that_has_not_begun_stays_a_load() -> None:
    node = shrinking(b=40)
    assert node.load("c", 30) == []
    assert node.resize("c", 40) == []
    assert node.done("s") == ["load c 40"]
    assert node.resize("c", 30) == [], "now that it runs, a resize follows it"
    assert node.done("c") == ["resize c 30"]


def test_a_load_that_has_not_begun_is_unloaded_at_once() -> None:
    """The station cannot drop it unseen: the node has the last word on what is gone."""
    node = shrinking(b=40)
    assert node.load("c", 30) == []
    assert node.unload("c") == ["unload c 0"]
    assert node.done("c") == node.done("s") == []


def test_an_instance_has_one_operation_at_a_time_shrinks_and_unloads_included() -> None:
    node = CheckedStation(a=20)
    assert node.resize("a", 60) == ["resize a 60"]
    assert node.resize("a", 10) == []
    assert node.unload("a") == [], "takes the place of the shrink, not of what runs"
    assert (node.station.promised_bytes, node.station.tracked_bytes) == (0, 60)
    assert node.done("a") == ["unload a 0"]
    assert node.done("a") == []
    assert node.station.free_bytes == 100


def test_a_growth_that_fails_gives_its_reservation_back_and_wakes_others() -> None:
    node = CheckedStation(a=20, b=20)
    assert node.resize("a", 80) == ["resize a 80"]
    assert node.resize("a", 40) == [], "waits for its own"
    assert node.resize("b", 60) == [], "promised, not free"
    assert node.fail("a") == ["resize a 40", "resize b 60"]
    assert node.fail("b") == []
    assert (node.station.promised_bytes, node.station.tracked_bytes) == (60, 60)


def test_a_load_that_fails_leaves_nothing_behind() -> None:
    node = CheckedStation(a=40)
    assert node.load("b", 60) == ["load b 60"]
    assert node.resize("b", 30) == node.load("c", 30) == []
    assert node.fail("b") == ["load c 30"], "what was to follow the load is dropped"
    assert node.station.size(InstanceId("b")).bytes == 0


def test_a_shrink_that_fails_takes_its_promise_back_and_what_waits_for_it_goes_on_waiting() -> None:
    node = shrinking(b=40)
    assert node.resize("b", 80) == []
    assert node.done("s", 50) == [], "cut short: 10 of the 40 bytes"
    assert node.station.free_bytes == -30
    assert node.load("c", 1) is None
    assert node.resize("s", 20) == ["resize s 20"]
    assert node.done("s") == ["resize b 80"]


def test_what_can_no_longer_be_kept_is_given_up_by_a_smaller_target() -> None:
    """The way out when a shrink has failed for good."""
    node = shrinking(b=40)
    assert node.resize("b", 80) == []
    assert node.fail("s") == []
    assert node.resize("b", 40) == ["resize b 40"]
    assert node.station.free_bytes == 0


def test_an_instance_that_is_gone_takes_all_that_was_under_way_with_it() -> None:
    node = CheckedStation(a=20, b=20)
    assert node.resize("a", 80) == ["resize a 80"]
    assert node.resize("a", 70) == node.resize("b", 30) == []
    assert node.forget("a") == ["resize b 30"]
    assert node.forget("a") == node.forget("never there") == node.done("a", 5) == []
    assert node.station.promised_bytes == 30


def test_a_node_that_has_more_than_its_capacity_grows_nothing_and_recovers() -> None:
    node = CheckedStation(a=90, b=60)
    assert node.station.free_bytes == -50
    assert node.resize("b", 61) is node.load("c", 1) is None
    assert node.resize("a", 80) == ["resize a 80"], "less than before fits, though still too much"
    assert node.resize("a", 20) == []
    assert node.done("a") == ["resize a 20"]
    assert node.load("c", 20) == [], "promised; a still has 80"
    assert node.done("a") == ["load c 20"]
    assert node.station.free_bytes == 0


def test_what_a_node_reports_counts_beside_what_runs_and_frees_what_is_not_held() -> None:
    node = shrinking(b=40)
    assert node.resize("b", 80) == []
    assert node.record("s", 55) == []
    assert node.record("s", 20) == ["resize b 80"], "the shrink has released before it is done"
    assert node.record("b", 85) == []
    assert (node.station.promised_bytes, node.station.tracked_bytes) == (100, 105)


def test_the_earliest_deadline_wakes_first_and_of_equal_ones_the_first_issued() -> None:
    node = shrinking(a=10, b=10, c=10, d=10)
    for name, by_s in (("a", 3), ("b", 2), ("c", 1), ("d", 2)):
        assert node.resize(name, 20, by_s) == []
    assert node.waiting() == ["resize c 20", "resize b 20", "resize d 20", "resize a 20"]
    assert node.done("s") == ["resize c 20", "resize b 20", "resize d 20", "resize a 20"]


def overtaking() -> CheckedStation:
    """`first` is needed at 5 s and waits for `s`; each byte that `x` grows by still fits."""
    node = shrinking(first=10, x=1, y=1)
    assert node.resize("first", 50, by_s=5) == []
    return node


def overtake(node: CheckedStation, times: int) -> None:
    for _ in range(times):
        size_bytes = node.station.size(InstanceId("x")).bytes + 1
        assert node.resize("x", size_bytes, by_s=9) == [f"resize x {size_bytes}"]
        assert node.done("x") == []


def test_one_that_waits_is_overtaken_so_often_and_then_holds_up_what_takes_memory() -> None:
    node = overtaking()
    overtake(node, OVERTAKEN_MAX)
    assert node.resize("x", 10, by_s=9) == node.load("z", 1, by_s=9) == []
    assert node.resize("y", 2, by_s=4) == ["resize y 2"], "it has the earlier deadline"
    assert node.done("s") == ["resize first 50", "resize x 10", "load z 1"]


def test_shrinks_and_unloads_are_never_held_up_and_overtake_nobody() -> None:
    node = overtaking()
    overtake(node, OVERTAKEN_MAX - 1)
    for size_bytes in (5, 4, 3):
        assert node.resize("x", size_bytes, by_s=9) == [f"resize x {size_bytes}"]
        assert node.done("x") == []
    overtake(node, 1)
    assert node.resize("x", 5, by_s=9) == []
    assert node.resize("x", 2, by_s=9) == ["resize x 2"]
    assert node.unload("y", by_s=9) == ["unload y 0"]


def test_a_newer_target_has_been_overtaken_as_often_as_the_one_it_replaced() -> None:
    node = overtaking()
    overtake(node, OVERTAKEN_MAX)
    assert node.resize("first", 45, by_s=5) == []
    assert node.resize("x", 10, by_s=9) == []
    assert node.resize("first", 45, by_s=10) == ["resize x 10"], "not before it is needed"


def test_the_count_begins_anew_once_it_has_started() -> None:
    node = overtaking()
    overtake(node, OVERTAKEN_MAX)
    assert node.done("s") == ["resize first 50"]
    assert node.done("first") == []
    assert node.resize("s", 2) == ["resize s 2"]
    assert node.resize("first", 72, by_s=5) == []
    overtake(node, OVERTAKEN_MAX)
    assert node.resize("x", 18, by_s=9) == []


def test_one_that_is_taken_back_wakes_what_it_held_up_and_leaves_no_count() -> None:
    node = overtaking()
    overtake(node, OVERTAKEN_MAX)
    assert node.resize("x", 10, by_s=9) == []
    assert node.cancel("first") == ["resize x 10"]
    assert node.station.size(InstanceId("first")).bytes == 10
    assert node.done("x") == []
    assert node.resize("first", 50, by_s=5) == []
    assert node.resize("x", 11, by_s=9) == ["resize x 11"], "it has been overtaken by nobody yet"


def test_there_may_be_nothing_to_take_back() -> None:
    node = shrinking(b=10)
    assert node.cancel("s") == node.cancel("b") == node.cancel("nobody") == []
    assert node.running() == ["s"], "what runs stays"


def test_a_shrink_that_waits_is_not_taken_back_for_its_promise_may_be_given_away() -> None:
    node = CheckedStation(a=20)
    assert node.resize("a", 60) == ["resize a 60"]
    assert node.resize("a", 30) == []
    assert node.load("b", 70) == []
    assert node.cancel("a") == []
    assert node.done("a") == ["resize a 30"]
    assert node.done("a") == ["load b 70"]


def test_one_that_waits_for_its_own_instance_is_not_overtaken_and_holds_nothing_up() -> None:
    node = CheckedStation(a=20, x=1)
    assert node.resize("a", 30) == ["resize a 30"]
    assert node.resize("a", 40) == []
    overtake(node, OVERTAKEN_MAX + 2)
    assert node.done("a") == ["resize a 40"]


SHARED = SharedWeights(key="model", size_bytes=40)
SHARES = dict.fromkeys("abc", SHARED)
"""The 40 bytes are the same for these three; `x` has all of its own."""


def test_what_instances_share_is_promised_and_tracked_once() -> None:
    node = CheckedStation(100, SHARES, a=60)
    assert node.wake("b", 80) == ["wake b 80"]
    assert (node.station.promised_bytes, node.station.tracked_bytes) == (100, 100)
    assert node.station.size(InstanceId("b")).bytes == 80
    assert node.wake("c", 41) is None, "nothing is left for what is its own"
    assert CheckedStation(100, SHARES, x=60).wake("b", 80) is None, "nobody has it there"


def test_the_last_that_leaves_gives_back_what_was_shared() -> None:
    node = CheckedStation(100, SHARES, a=60, b=50)
    assert node.unload("a") == ["unload a 0"]
    assert (node.station.promised_bytes, node.station.tracked_bytes) == (50, 70)
    assert node.done("a") == []
    assert node.station.tracked_bytes == 50
    assert node.forget("b") == []
    assert node.station.promised_bytes == node.station.tracked_bytes == 0


def test_a_load_that_fails_leaves_with_those_who_stay_what_it_shared() -> None:
    node = CheckedStation(100, SHARES)
    assert node.load("a", 60) == ["load a 60"]
    assert node.load("b", 50) == []
    assert node.station.promised_bytes == 70
    assert node.done("a", 0) == ["load b 50"], "it brings the weights now"
    assert node.station.tracked_bytes == 50


def test_a_load_in_the_place_of_who_leaves_with_the_same_weights_waits_for_its_own_alone() -> None:
    node = CheckedStation(100, SHARES, a=60, x=30)
    assert node.unload("a") == ["unload a 0"]
    assert node.load("b", 70) == [], "60 and 30 are still there, and 30 of its own"
    assert node.done("a") == ["load b 70"]
    assert node.unload("b") == []
    assert CheckedStation(100, SHARES, a=60, x=30).load("b", 50) == ["load b 50"]


def test_what_a_set_frees_counts_weights_with_the_last_that_has_them() -> None:
    node = CheckedStation(100, SHARES, a=60, b=50, x=20)
    freed = node.station.freed_bytes
    a, b, x = InstanceId("a"), InstanceId("b"), InstanceId("x")
    assert (freed((a,)), freed((b,)), freed((x,)), freed((a, b))) == (20, 10, 20, 70)
    assert freed((a, b), SHARED) == 30, "who comes for it keeps the weights"
    assert freed((a, b), SharedWeights(key="another", size_bytes=40)) == 70
    assert node.station.spared_bytes(SHARED) == 40
    assert node.station.spared_bytes(SharedWeights(key="model", size_bytes=30)) == 30


def test_a_load_shows_what_it_shares() -> None:
    node = CheckedStation(100, {"a": SHARED}, a=60)
    assert node.load("b", 40) == ["load b 40"]
    node.done("b", 50, SHARED)
    assert node.station.promised_bytes == node.station.tracked_bytes == 70


def test_of_several_the_first_counts_what_they_share() -> None:
    less = SharedWeights(key="model", size_bytes=30)
    other = SharedWeights(key="other", size_bytes=9)
    sizes = [(35, less), (50, SHARED), (10, None), (60, SHARED), (20, SHARED), (10, other)]
    assert counted_once(sizes) == [35, 20, 10, 20, 0, 10]
    assert counted_once([]) == []


def test_what_waits_keeps_its_promise_when_a_load_has_shown_what_its_weights_are() -> None:
    station, a = ReservationStation(capacity_bytes=100), InstanceId("a")
    (load,) = station.issue(ReservationKind.LOAD, a, Size(40, 10), 0.0) or ()
    assert station.issue(ReservationKind.RESIZE, a, Size(40, 30), 0.0) == ()
    assert (station.promised, station.tracked) == (Size(40, 30), load.size)
    (resize,) = station.done(a, Size(50, 10))
    assert resize.size == station.promised == station.tracked == Size(50, 20)
    assert station.issue(ReservationKind.UNLOAD, a, NOTHING, 0.0) == ()
    assert (station.promised, station.free_bytes) == (NOTHING, 100)


WALKS = int(os.environ.get("MESH_STATION_WALKS") or (500 if DEEP else 40))
STEPS = 50
CAPACITY = 24
NAMES = tuple(InstanceId(f"i{n}") for n in range(8))
NAME = st.sampled_from(NAMES)
PICK = st.integers(0, len(NAMES) - 1)
SIZE = st.integers(0, 9)
CROWDED = (12, 1, 1, 1, 1, 1, 1)
"""The first shrinks, the second waits for it, and what the others ask for may overtake it."""
STARTS = (CROWDED, (), (8, 5, 4, 3, 1), CROWDED)
SHARE_SETS: tuple[Mapping[str, SharedWeights], ...] = (
    {},
    {name: SharedWeights(key=n % 2, size_bytes=3 + n % 3) for n, name in enumerate(NAMES[:6])},
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
        shares=st.sampled_from(SHARE_SETS),
    )
    def begin(
        self,
        honest: bool,
        held: tuple[int, ...],
        overtaken_max: int,
        shares: Mapping[str, SharedWeights],
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
    assert min(SEEN["refused"], SEEN["replaced"], SEEN["cancelled"], SEEN["beyond"]) > 0, SEEN


def test_a_pool_books_the_two_largest_weights_beside_all_caches() -> None:
    station = ReservationStation(capacity_bytes=100, pools=True)

    def load(name: str, weights_bytes: int, kv_bytes: int) -> bool:
        size, share = (
            Size(weights_bytes, kv_bytes),
            SharedWeights(key=None, size_bytes=weights_bytes),
        )
        kind = ReservationKind.LOAD
        return station.issue(kind, InstanceId(name), size, 0.0, shared=share) is not None

    assert all((load("a", 30, 5), load("b", 20, 5), load("c", 30, 5), load("d", 10, 5)))
    assert station.promised == Size(60, 20)
    assert station.spared_bytes(SharedWeights(key=None, size_bytes=40)) == 30
    going = [InstanceId("a"), InstanceId("c")]
    assert station.freed_bytes(going) == 30 + 10
    assert station.freed_bytes(going, SharedWeights(key=None, size_bytes=40)) == 10 + 10
    assert not load("e", 40, 11)
    assert load("e", 40, 10)
    station.forget(InstanceId("e"))
    station.forget(InstanceId("a"))
    assert station.promised == Size(50, 15)


def test_what_stays_of_each_instance_is_booked_beside_the_pool() -> None:
    footprint = Footprint(weights_bytes=10, kv_block_bytes=3, block_tokens=1, stays_bytes=2)
    station = ReservationStation(capacity_bytes=100, pools=True)
    names = [InstanceId(name) for name in "abc"]
    for name in names:
        assert station.issue(ReservationKind.LOAD, name, footprint.size(5), 0.0) is not None
    assert station.promised == Size(20, 3 * (2 + 15))
    assert [footprint.kv_blocks(station.size(name)) for name in names] == [5, 5, 5]


def test_a_load_of_a_pool_that_comes_out_smaller_promises_its_cache_no_more() -> None:
    station, c = ReservationStation(capacity_bytes=30, pools=True), InstanceId("c")
    share = SharedWeights(key=None, size_bytes=10)
    for name in ("a", "b"):
        station.record(InstanceId(name), Size(10, 1), share)
    assert station.issue(ReservationKind.LOAD, c, Size(8, 2), 0.0, shared=share)
    assert station.issue(RESIZE, c, Size(8, 6), 0.0) == ()
    station.done(c, Size(5, 2))
    assert (station.promised_bytes, station.size(c)) == (28, Size(5, 6))
