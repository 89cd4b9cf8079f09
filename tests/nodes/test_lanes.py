"""The live lanes: order, errors, bounds and an orderly end."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from mesh.domain.errors import EngineError, MeshError, ModelError, OutOfMemory
from mesh.domain.node_events import LinkClosed, NodeEvent
from mesh.runtime.node_actions import Lane
from mesh_nodes import lanes as lanes_module
from mesh_nodes.lanes import LOADING_NICE, LaneThread, Messenger, ThreadLanes

WAIT_S = 60.0


class Posted:
    """The events that a ThreadLanes posted, and a bounded wait for the n-th."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.threads: set[str] = set()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def post(self, event: NodeEvent) -> None:
        assert isinstance(event, LinkClosed)
        self.texts.append(event.reason)
        self.threads.add(threading.current_thread().name)
        self._loop.call_soon_threadsafe(self._changed.set)

    async def wait_for(self, count: int) -> list[str]:
        async with asyncio.timeout(WAIT_S):
            while len(self.texts) < count:
                await self._changed.wait()
                self._changed.clear()
        return self.texts


def _say(result: object) -> NodeEvent:
    if isinstance(result, MeshError):
        return LinkClosed(reason=f"{type(result).__name__}: {result.message}")
    return LinkClosed(reason=str(result))


def _nothing() -> None:
    """The last call of lanes without an engine."""


def _raise(error: BaseException) -> Callable[[], str]:
    def call() -> str:
        raise error

    return call


async def test_calls_of_a_lane_run_in_order_and_steps_post_from_their_own_thread() -> None:
    """No other thread has to wake up between the end of a step and the decision on the next."""
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    for n in range(500):
        lanes.run(Lane.COMPUTE, lambda n=n: n, _say)  # type: ignore[misc]
    assert await posted.wait_for(500) == [str(n) for n in range(500)]
    assert posted.threads == {"mesh-compute"}
    lanes.run(Lane.LOADING, lambda: "loaded", _say)
    assert (await posted.wait_for(501))[-1] == "loaded"
    assert posted.threads == {"mesh-compute", threading.current_thread().name}
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)


async def test_it_is_known_for_how_long_a_call_has_been_computing() -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    began, release = threading.Event(), threading.Event()

    def call() -> str:
        began.set()
        release.wait(WAIT_S)
        return "step"

    assert lanes.computing_s() == 0.0
    lanes.run(Lane.COMPUTE, call, _say)
    assert await asyncio.to_thread(began.wait, WAIT_S)
    first_s = lanes.computing_s()
    await asyncio.sleep(0.01)
    assert lanes.computing_s() >= first_s + 0.01
    release.set()
    assert await posted.wait_for(1) == ["step"]
    assert lanes.computing_s() == 0.0
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)


async def test_a_long_load_does_not_hold_up_computing() -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    release = threading.Event()
    lanes.run(Lane.LOADING, lambda: release.wait(WAIT_S), lambda _: LinkClosed(reason="loaded"))
    lanes.run(Lane.COMPUTE, lambda: "step", _say)
    assert await posted.wait_for(1) == ["step"]
    release.set()
    assert await posted.wait_for(2) == ["step", "loaded"]
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)


async def test_unexpected_errors_become_engine_errors(caplog: pytest.LogCaptureFixture) -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    lanes.run(Lane.COMPUTE, _raise(ModelError("torn")), _say)
    lanes.run(Lane.COMPUTE, _raise(ZeroDivisionError("by zero")), _say)
    lanes.run(Lane.COMPUTE, _raise(MemoryError("no more")), _say)
    lanes.run(Lane.COMPUTE, lambda: "still there", _say)
    assert await posted.wait_for(4) == [
        "ModelError: torn",
        f"{EngineError.__name__}: ZeroDivisionError: by zero",
        f"{OutOfMemory.__name__}: out of memory in an engine call: no more",
        "still there",
    ]
    assert "Traceback" in caplog.text
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)


async def test_a_call_whose_outcome_makes_no_event_posts_none() -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    lanes.run(Lane.COMPUTE, lambda: "dropped", lambda _: None)
    lanes.run(Lane.COMPUTE, lambda: "kept", _say)
    assert await posted.wait_for(1) == ["kept"]
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)


async def test_a_full_lane_fails_further_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lanes_module.PENDING_CALLS_MAX, Lane.COMPUTE, 2)
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    release = threading.Event()
    lanes.run(Lane.COMPUTE, lambda: release.wait(WAIT_S), lambda _: LinkClosed(reason="first"))
    lanes.run(Lane.COMPUTE, lambda: "second", _say)
    lanes.run(Lane.COMPUTE, lambda: "third", _say)
    (refused,) = await posted.wait_for(1)
    assert "compute lane has 2 calls waiting" in refused
    release.set()
    await posted.wait_for(3)
    lanes.run(Lane.COMPUTE, lambda: "fourth", _say)
    assert (await posted.wait_for(4))[1:] == ["first", "second", "fourth"]
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)


async def test_close_drops_what_waits_and_posts_nothing_more() -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    started, release, ran = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        release.wait(WAIT_S)

    lanes.run(Lane.COMPUTE, first, _say)
    lanes.run(Lane.COMPUTE, ran.set, _say)
    assert await asyncio.to_thread(started.wait, WAIT_S)
    assert not lanes.close(timeout_s=0.01, last=_nothing), "a call outlasts a short bound"
    release.set()
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)
    await asyncio.sleep(0)
    assert not ran.is_set()
    assert posted.texts == []


async def test_the_last_call_comes_after_all_others_on_the_compute_thread() -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    threads: list[str] = []
    lanes.run(Lane.COMPUTE, lambda: threads.append(threading.current_thread().name), _say)
    await posted.wait_for(1)
    assert lanes.close(
        timeout_s=WAIT_S, last=lambda: threads.append(threading.current_thread().name + " last")
    )
    assert threads == ["mesh-compute", "mesh-compute last"]


async def test_the_last_call_is_left_out_while_a_load_is_under_way() -> None:
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=Posted().post)
    started, release, closed = threading.Event(), threading.Event(), threading.Event()

    def load() -> None:
        started.set()
        release.wait(WAIT_S)

    lanes.run(Lane.LOADING, load, lambda _: None)
    assert await asyncio.to_thread(started.wait, WAIT_S)
    assert not lanes.close(timeout_s=0.01, last=closed.set)
    assert not closed.is_set()
    release.set()


async def test_progress_from_within_a_call_is_posted_before_its_outcome() -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)

    def call() -> str:
        lanes.post_soon(LinkClosed(reason="half"))
        return "done"

    lanes.run(Lane.LOADING, call, _say)
    assert await posted.wait_for(2) == ["half", "done"]
    assert lanes.close(timeout_s=WAIT_S, last=_nothing)


async def test_an_unload_beside_holds_up_nothing_and_the_last_call_ends_it() -> None:
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post)
    unloading, closed = threading.Event(), threading.Event()

    def unload() -> None:
        unloading.set()
        closed.wait(WAIT_S)

    lanes.run(Lane.COMPUTE, _nothing, lambda _: lanes.run(Lane.UNLOADING, unload, _say))
    assert await asyncio.to_thread(unloading.wait, WAIT_S)
    lanes.run(Lane.LOADING, lambda: "loaded", _say)
    lanes.run(Lane.COMPUTE, lambda: "step", _say)
    assert sorted(await posted.wait_for(2)) == ["loaded", "step"]
    assert await asyncio.to_thread(lanes.close, WAIT_S, closed.set)
    assert len(posted.texts) == 2


async def test_loads_and_swaps_that_compute_here_yield_to_iterations_and_wakes_do_not() -> None:
    own, posted = _nice(), Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post, loads_in_process=True)
    for count, lane in enumerate(Lane, 1):
        lanes.run(lane, _nice, _say)
        await posted.wait_for(count)
    below = (Lane.LOADING, Lane.SWAPPING)
    assert posted.texts == [str(own + LOADING_NICE * (lane in below)) for lane in Lane]
    assert await asyncio.to_thread(lanes.close, WAIT_S, _nothing)


async def test_a_sandbox_without_priorities_has_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    posted = Posted()
    lanes = ThreadLanes(loop=asyncio.get_running_loop(), post=posted.post, loads_in_process=True)
    lanes.run(Lane.LOADING, lambda: "loaded", _say)
    await posted.wait_for(1)
    assert await asyncio.to_thread(lanes.close, WAIT_S, _nothing)


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


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


async def test_calls_arrive_on_the_loops_thread_in_the_order_of_posting() -> None:
    messenger = Messenger(asyncio.get_running_loop())
    came: list[tuple[int, int]] = []
    done = asyncio.Event()

    def arrived(number: int) -> None:
        came.append((number, threading.get_ident()))

    def post_all() -> None:
        for number in range(200):
            messenger.post(partial(arrived, number))
        messenger.post(done.set)

    await asyncio.to_thread(post_all)
    async with asyncio.timeout(10):
        await done.wait()
    assert came == [(number, threading.get_ident()) for number in range(200)]
    messenger.close(10)


def test_a_closed_loop_ends_it_quietly() -> None:
    loop, before = asyncio.new_event_loop(), set(threading.enumerate())
    messenger = Messenger(loop)
    loop.close()
    messenger.post(lambda: None)
    messenger.close(10)
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name == "mesh-messenger" and t.is_alive()]
