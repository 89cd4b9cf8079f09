"""The live lanes: two daemon threads that make the engine's blocking calls, in order.

The asyncio thread hands a call over and gets an event back; between the end of a step and the start
of the next lies one round trip of tens of microseconds, which every token of the node pays. So a
hand-over is one C-level queue operation and an event comes back by one `call_soon_threadsafe`.
Before: `NodePerformer`. After: the host, by `post`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from mesh.domain.errors import EngineError, MeshError, OutOfMemory
from mesh.domain.events import NodeEvent
from mesh.runtime.node_actions import Lane
from mesh_nodes.lane_thread import LaneThread

R = TypeVar("R")

PENDING_CALLS_MAX = {Lane.COMPUTE: 8192, Lane.LOADING: 256}
"""Calls that may wait or run on a lane. The core keeps one step under way and the controller bounds
batches and loads, so a full lane means that something is stuck; further calls then fail at once."""

SWITCH_INTERVAL_S = 0.0005
"""For sys.setswitchinterval, by the composition root: how long a thread that wants the interpreter
may be kept waiting by one that computes in Python. A load's Python part runs beside the steps: at
Python's default of 5 ms it would delay every one of them by that."""

HAND_OVER_S_MAX = 0.001
"""How long the loop lets the compute thread go first. It takes a tenth of it unless all cores are
busy; then nothing is gained by waiting longer."""

log = logging.getLogger(__name__)


class ThreadLanes:
    """See `mesh.runtime.node_actions.Lanes`. `run` is for the loop's thread only, `post_soon` for
    any. After `close` nothing is posted any more.
    """

    def __init__(
        self, *, loop: asyncio.AbstractEventLoop, post: Callable[[NodeEvent], None]
    ) -> None:
        self._loop = loop
        self._post = post
        self._closed = False
        self._pending = dict.fromkeys(Lane, 0)
        self._handing_over = False
        self._threads = {lane: LaneThread(f"mesh-{lane.value}") for lane in Lane}

    def run(
        self,
        lane: Lane,
        call: Callable[[], R],
        done: Callable[[R | MeshError], NodeEvent | None],
    ) -> None:
        if self._closed:
            return
        if self._pending[lane] >= PENDING_CALLS_MAX[lane]:
            self._loop.call_soon(self._deliver, done, _full(lane))
            return
        self._pending[lane] += 1

        def work() -> None:
            result = _outcome(call)
            self._call_soon(self._finish, lane, done, result)

        self._threads[lane].put(work)
        if lane is Lane.COMPUTE and not self._handing_over:
            # After all calls of this turn of the host, before the loop's next work.
            self._handing_over = True
            self._loop.call_soon(self._hand_over)

    def post_soon(self, event: NodeEvent) -> None:
        self._call_soon(self._post_open, event)

    def close(self, timeout_s: float, last: Callable[[], None]) -> bool:
        """Drop what waits, let the threads end, then `last`, on the compute lane's thread.

        False when they have not come to their end within `timeout_s`; `last` is left out then if a
        load is still under way, since it takes from the engine what the load works with.
        """
        self._closed = True
        give_up_s = time.monotonic() + timeout_s
        compute, loading = self._threads[Lane.COMPUTE], self._threads[Lane.LOADING]
        loading.end()
        loading_ended = loading.ended(give_up_s)
        compute.end((lambda: _finally(last)) if loading_ended else None)
        return compute.ended(give_up_s) and loading_ended

    def _hand_over(self) -> None:
        self._handing_over = False
        self._threads[Lane.COMPUTE].hand_over(HAND_OVER_S_MAX)

    def _call_soon(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The loop has closed: the agent is on its way out, and nobody waits for the result.
            log.debug("a result came after the loop had closed")

    def _finish(
        self, lane: Lane, done: Callable[[R | MeshError], NodeEvent | None], result: R | MeshError
    ) -> None:
        self._pending[lane] -= 1
        self._deliver(done, result)

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
    except Exception as error:
        log.exception("an engine call failed unexpectedly")
        return EngineError(f"{type(error).__name__}: {error}")


def _finally(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        log.exception("the engine failed while it was closed")


def _full(lane: Lane) -> EngineError:
    return EngineError(
        f"the {lane.value} lane has {PENDING_CALLS_MAX[lane]} calls waiting, which is its limit",
        hint="the engine does not return from a call: look at the node's log and restart it",
    )
