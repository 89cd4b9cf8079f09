"""The virtual lanes: a call is made at once, what came of it is posted after as long as it took.

One lane's calls follow each other, the lanes go beside each other, as the live node's threads do.
The engine says through `spend` how long a call takes; a call that takes no time is over before the
next event. Before: `NodePerformer`. After: the node's host, by `post`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from mesh.domain.errors import MeshError
from mesh.domain.messages import InstanceLoaded
from mesh.domain.node_events import NodeEvent
from mesh.runtime.clock import Clock
from mesh.runtime.node_actions import Lane

R = TypeVar("R")


class VirtualLanes:
    """See `mesh.runtime.node_actions.Lanes`. The core keeps one step under way and the controller
    bounds batches and loads, and with them what waits here. `by_hand`: a call is made when
    `run_one` says so.
    """

    def __init__(self, clock: Clock, *, by_hand: bool = False) -> None:
        self._clock = clock
        self._by_hand = by_hand
        self._spent_s = 0.0
        self._busy = dict.fromkeys(Lane, False)
        self.busy_s = dict.fromkeys(Lane, 0.0)
        """Seconds in calls."""
        self._waiting: dict[Lane, deque[Callable[[], None]]] = {lane: deque() for lane in Lane}
        self.post: Callable[[NodeEvent], None] = _unbound
        self.more_load_s: Callable[[], float] = lambda: 0.0
        """The lanes ask it when a load has taken the time it had spent: how much longer the load
        takes because of what went on beside it, in seconds.
        """

    def spend(self, seconds: float) -> None:
        """The call that is being made takes so much longer."""
        self._spent_s += seconds

    def run(
        self, lane: Lane, call: Callable[[], R], done: Callable[[R | MeshError], NodeEvent | None]
    ) -> None:
        if self._by_hand or self._busy[lane] or self._waiting[lane]:
            self._waiting[lane].append(lambda: self._make(lane, call, done))
            self._next(lane)
        else:
            self._make(lane, call, done)

    def run_one(self, lane: Lane) -> bool:
        """Make the next call of a lane; False when none waits, or one is still being made."""
        if self._busy[lane] or not self._waiting[lane]:
            return False
        self._waiting[lane].popleft()()
        return True

    def post_soon(self, event: NodeEvent) -> None:
        """Post it when the call that is being made, if one is, has come as far as that."""
        if self._by_hand:
            self.post(event)
            return
        self._clock.call_at(self._clock.now_s() + self._spent_s, lambda: self.post(event))

    def _next(self, lane: Lane) -> None:
        while not self._by_hand and self.run_one(lane):
            pass

    def _make(
        self, lane: Lane, call: Callable[[], R], done: Callable[[R | MeshError], NodeEvent | None]
    ) -> None:
        self._busy[lane] = True
        self._spent_s = 0.0
        result: R | MeshError
        try:
            result = call()
        except MeshError as error:
            result = error
        spent_s, self._spent_s = self._spent_s, 0.0

        def end(late_s: float = 0.0) -> None:
            self._busy[lane] = False
            event = done(_longer(result, late_s))
            if event is not None:
                self.post(event)

        if spent_s > 0.0:
            self._wait(lane, spent_s, end)
        else:
            end()

    def _wait(
        self, lane: Lane, seconds: float, end: Callable[[float], None], late_s: float = 0.0
    ) -> None:
        """Call `end` once the lane has been busy for so long, and for what has made a load longer
        meanwhile, which `end` is told. What it calls back refers to nothing that refers to it:
        what an iteration gave is freed without the collector.
        """

        def over() -> None:
            more_s = self.more_load_s() if lane is Lane.LOADING else 0.0
            if more_s > 0.0:
                self._wait(lane, more_s, end, late_s + more_s)
            else:
                end(late_s)
                self._next(lane)

        self.busy_s[lane] += seconds
        self._clock.call_at(self._clock.now_s() + seconds, over)


def _longer(result: R, more_s: float) -> R:
    """What a load yields says how long it took in the end."""
    if more_s and isinstance(result, InstanceLoaded):
        return replace(result, elapsed_s=result.elapsed_s + more_s)
    return result


def _unbound(event: NodeEvent) -> None:
    raise RuntimeError(f"the lanes have no host yet, so {type(event).__name__} is lost")
