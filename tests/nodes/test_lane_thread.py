"""A lane's thread: who hands over waits until it has begun, and no longer."""

import threading
import time

from mesh_nodes.lanes import LaneThread

WAIT_S = 60.0


def _ended(lane: LaneThread) -> bool:
    lane.end()
    return lane.ended(time.monotonic() + WAIT_S)


def _hands_over_at_once(lane: LaneThread) -> bool:
    handed = threading.Event()

    def hand_over() -> None:
        lane.hand_over(WAIT_S)
        handed.set()

    threading.Thread(target=hand_over, daemon=True).start()
    return handed.wait(WAIT_S / 2)


def test_after_a_hand_over_the_thread_has_begun() -> None:
    lane = LaneThread("test")
    for _ in range(200):
        begun = threading.Event()
        lane.put(begun.set)
        lane.hand_over(WAIT_S)
        # Begun means that it is at work: `set` follows without anything in between.
        assert begun.wait(WAIT_S)
    assert _ended(lane)


def test_a_hand_over_does_not_wait_for_a_thread_that_has_work_in_hand() -> None:
    lane = LaneThread("test")
    begun, release = threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        release.wait(WAIT_S)

    lane.put(long)
    assert begun.wait(WAIT_S)
    lane.put(lambda: None)
    assert _hands_over_at_once(lane), "it waited for the call in hand"
    release.set()
    assert _ended(lane)


def test_a_hand_over_of_nothing_returns_at_once() -> None:
    lane = LaneThread("test")
    assert _hands_over_at_once(lane)
    assert _ended(lane)


def test_the_end_drops_what_waits_and_runs_the_last_call() -> None:
    lane = LaneThread("test")
    begun, release = threading.Event(), threading.Event()
    ran: list[str] = []

    def long() -> None:
        begun.set()
        release.wait(WAIT_S)

    lane.put(long)
    assert begun.wait(WAIT_S)
    lane.put(lambda: ran.append("dropped"))
    lane.end(lambda: ran.append("last"))
    assert not lane.ended(time.monotonic())
    release.set()
    assert lane.ended(time.monotonic() + WAIT_S)
    assert ran == ["last"]
