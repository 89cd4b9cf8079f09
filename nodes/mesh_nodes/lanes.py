"""The live lanes: daemon threads that make the engine's blocking calls, each lane's in order.

Between the end of a step and the start of the next lies the node core's decision, which every
token of the node pays for. So the compute thread posts its own event and finds its next call in its
queue: no other thread has to wake up in between, which cost 0.5 ms on two busy cores. What comes of
the others' calls is posted from the loop. Before: `NodePerformer`. After: the host, by `post`.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from mesh.domain.errors import EngineError, MeshError, OutOfMemory
from mesh.domain.node_events import NodeEvent
from mesh.runtime.node_actions import Lane

Call = Callable[[], object]


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call on the loop's thread, from any. Once the loop has closed the agent is on its way out,
    and nobody waits for the call.
    """
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


class Messenger:
    """Carries calls to the asyncio loop without holding up the thread that makes them.

    `call_soon_threadsafe` writes to a socket, and gives the interpreter away while it does: the
    loop, woken, takes it for as long as it likes, 0.5 ms where this was measured, and the compute
    thread has an iteration to start. A queue takes a microsecond. Calls are made on the loop's
    thread, in the order of `post`, which any thread may use.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._carry, name="mesh-messenger", daemon=True)
        self._thread.start()

    def post(self, call: Call) -> None:
        """Puts the call in the queue. The callers bound its length: the link refuses reports beyond
        its own bound.
        """
        self._calls.put(call)

    def close(self, timeout_s: float) -> None:
        """Carry what has been posted, then end."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _carry(self) -> None:
        while (call := self._calls.get()) is not None:
            call_on(self._loop, call)


Work = Callable[[], None]
"""Never raises: it hands every failure on as its result."""


class LaneThread:
    """One lane's first-in-first-out queue of calls.

    Who puts a call holds the interpreter and would keep it for its own work; the thread, woken,
    would get it only after a switch interval. `hand_over` gives it away. `put` is for any thread,
    its own included; `hand_over` and `end` are for one other.
    """

    def __init__(self, name: str, *, nice: int = 0) -> None:
        """`nice`: how far it is below the process's other threads."""
        self._nice = nice
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._working = False
        self._begun = threading.Lock()
        self._begun.acquire()
        self._thread = threading.Thread(target=self._work_off, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        self._queue.put(work)

    def hand_over(self, timeout_s: float) -> None:
        """Wait until the thread has begun what was put, unless it has something else in hand."""
        if self._working or self._queue.empty():
            return
        # One release may be left of a call that began before anyone waited for it.
        self._begun.acquire(blocking=False)
        if not self._queue.empty():
            self._begun.acquire(timeout=timeout_s)

    def end(self, last: Work | None = None) -> None:
        """Drop what waits; the thread ends after the call in hand, and `last`."""
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        if last is not None:
            self._queue.put(last)
        self._queue.put(None)

    def ended(self, give_up_s: float) -> bool:
        """Whether the thread has ended, now or by that monotonic time."""
        self._thread.join(max(0.0, give_up_s - time.monotonic()))
        return not self._thread.is_alive()

    def _work_off(self) -> None:
        if self._nice:
            thread = threading.get_native_id()
            # A sandbox may refuse it; calls would wait for ever for a thread that ended here.
            with contextlib.suppress(OSError):
                nice = os.getpriority(os.PRIO_PROCESS, thread) + self._nice
                os.setpriority(os.PRIO_PROCESS, thread, nice)
        while (work := self._queue.get()) is not None:
            self._working = True
            if self._begun.locked():
                self._begun.release()
            work()
            self._working = False


R = TypeVar("R")

PENDING_CALLS_MAX = {lane: 8192 if lane is Lane.COMPUTE else 256 for lane in Lane}
"""Calls that may wait or run on a lane. The core keeps one step under way and the controller bounds
batches and loads, so a full lane means that something is stuck; further calls then fail at once."""

LOADING_NICE = 5
"""How far loads from disk, and swaps, are below the iterations that they run beside. One of their
threads that has to share its core with a load keeps three quarters of it instead of half; at 10 it
would keep nine tenths, and promised loads would take several times as long. OpenVINO's threads are
there before the first load, so that none that computes inherits it: it cannot be taken back.
"""

SWITCH_INTERVAL_S = 0.0005
"""For sys.setswitchinterval, by the composition root: how long a thread that wants the interpreter
may be kept waiting by one that computes in Python. A load's Python part runs beside the steps: at
Python's default of 5 ms it would delay every one of them by that."""

HAND_OVER_S_MAX = 0.001
"""How long the loop lets the compute thread go first. It takes a tenth of it unless all cores are
busy; then nothing is gained by waiting longer."""

log = logging.getLogger(__name__)


class ThreadLanes:
    """See `mesh.runtime.node_actions.Lanes`. All of it may be called from any thread, and `post` is
    called from the compute thread and the loop's. After `close` nothing is posted any more.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[NodeEvent], None],
        loads_in_process: bool = False,
    ) -> None:
        """See `EngineCapabilities` for `loads_in_process`."""
        self._loop = loop
        self._post = post
        self._closed = False
        self._loop_thread = threading.get_ident()
        self._count = threading.Lock()
        self._pending = dict.fromkeys(Lane, 0)
        self._computing_since_s: float | None = None
        self._handing_over = False
        below = (Lane.LOADING, Lane.SWAPPING)
        nice = dict.fromkeys(below, LOADING_NICE) if loads_in_process else {}
        self._threads = {
            lane: LaneThread(f"mesh-{lane.value}", nice=nice.get(lane, 0)) for lane in Lane
        }

    def run(
        self, lane: Lane, call: Callable[[], R], done: Callable[[R | MeshError], NodeEvent | None]
    ) -> None:
        if self._closed:
            return
        with self._count:
            full = self._pending[lane] >= PENDING_CALLS_MAX[lane]
            if not full:
                self._pending[lane] += 1
        if full:
            call_on(self._loop, self._deliver, done, _full(lane))
            return

        def work() -> None:
            if lane is Lane.COMPUTE:
                self._computing_since_s = time.monotonic()
            result = _outcome(call)
            if lane is Lane.COMPUTE:
                self._computing_since_s = None
            with self._count:
                self._pending[lane] -= 1
            if lane is Lane.COMPUTE:
                _guarded(lambda: self._deliver(done, result))
            else:
                call_on(self._loop, self._deliver, done, result)

        self._threads[lane].put(work)
        on_loop = threading.get_ident() == self._loop_thread
        if lane is Lane.COMPUTE and on_loop and not self._handing_over:
            # After all calls of this turn of the host, before the loop's next work.
            self._handing_over = True
            self._loop.call_soon(self._hand_over)

    def post_soon(self, event: NodeEvent) -> None:
        call_on(self._loop, self._post_open, event)

    def computing_s(self) -> float:
        """How long the compute lane has been in its present call; 0 when it is in none."""
        since_s = self._computing_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self, timeout_s: float, last: Callable[[], None]) -> bool:
        """Drop what waits, let the threads end, then `last`, on the compute lane's thread.

        False when they have not come to their end within `timeout_s`; `last` is left out then if a
        load is still under way, since it takes from the engine what the load works with.
        """
        self._closed = True
        give_up_s = time.monotonic() + timeout_s
        compute, unloading = self._threads[Lane.COMPUTE], self._threads[Lane.UNLOADING]
        before = (Lane.WAKING, Lane.LOADING, Lane.PREPARING, Lane.SWAPPING)
        loading = [self._threads[lane] for lane in before]
        unloading.end()
        for thread in loading:
            thread.end()
        loading_ended = all(thread.ended(give_up_s) for thread in loading)
        compute.end((lambda: _guarded(last)) if loading_ended else None)
        # `last` cuts an unload short: it takes from the engine what is being unloaded.
        return compute.ended(give_up_s) and unloading.ended(give_up_s) and loading_ended

    def _hand_over(self) -> None:
        self._handing_over = False
        self._threads[Lane.COMPUTE].hand_over(HAND_OVER_S_MAX)

    def _deliver(
        self, done: Callable[[R | MeshError], NodeEvent | None], result: R | MeshError
    ) -> None:
        event = done(result)
        if event is not None:
            self._post_open(event)

    def _post_open(self, event: NodeEvent) -> None:
        if not self._closed:
            self._post(event)


def _outcome(call: Callable[[], R]) -> R | MeshError:
    try:
        return call()
    except MeshError as error:
        return error
    except MemoryError as error:
        return OutOfMemory(f"out of memory in an engine call: {error}")
    except BaseException as error:  # a library's panic is no Exception
        log.exception("an engine call failed unexpectedly")
        return EngineError(f"{type(error).__name__}: {error}")


def _guarded(call: Callable[[], None]) -> None:
    """A lane's thread must outlive whatever is called on it."""
    try:
        call()
    except BaseException:
        log.exception("a call on an engine's lane failed")


def _full(lane: Lane) -> EngineError:
    return EngineError(
        f"the {lane.value} lane has {PENDING_CALLS_MAX[lane]} calls waiting, which is its limit",
        hint="the engine does not return from a call: look at the node's log and restart it",
    )
