"""The one loop of mesh: an event comes in, a core decides, its actions are carried out.

The same loop runs a live controller, a live node and both in the simulator. It owns the queue of
events that actions cause while they are carried out, and the journal of what was decided. It never
waits: the clock, the engine and the links call `post` when something happened.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Generic, Protocol, TypeVar

from mesh.runtime.clock import Clock

Event = TypeVar("Event")
Action = TypeVar("Action")
EventIn = TypeVar("EventIn", contravariant=True)
ActionOut = TypeVar("ActionOut", covariant=True)


DECISION_S_MAX = 0.01
"""The longest that a core may take for one event: tokens of others wait meanwhile."""
TOLD_APART_S = 1.0
"""Between two times that a core is told of its slowness."""


class Core(Protocol[EventIn, ActionOut]):
    """A decision machine: pure but for its own state."""

    def handle(self, event: EventIn, now_s: float) -> Sequence[ActionOut]: ...


class Recorder(Protocol):
    """Keeps what was decided, in order."""

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None: ...


class Host(Generic[Event, Action]):
    """Runs one core. One `post` at a time: who posts from several threads holds a lock."""

    def __init__(
        self,
        *,
        core: Core[Event, Action],
        clock: Clock,
        perform: Callable[[Action], None],
        recorders: Sequence[Recorder] = (),
        took_long: Callable[[float], Event] | None = None,
        decision_s_max: float = DECISION_S_MAX,
    ) -> None:
        """`took_long`: what the core is told where it took longer than `decision_s_max` to decide,
        which its own clock cannot tell it; once in a while at most.
        """
        self._core = core
        self._clock = clock
        self._perform = perform
        self._recorders = recorders
        self._events: deque[Event] = deque()
        self._running = False
        self._took_long = took_long
        self._decision_s_max = decision_s_max
        self._told_s = -inf

    def post(self, event: Event) -> None:
        """Handle an event and all that it causes at once; during an action, right after it."""
        self._events.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._events:
                event, now_s = self._events.popleft(), self._clock.now_s()
                actions = self._core.handle(event, now_s)
                if self._took_long is not None:
                    self._check_time(now_s, self._took_long)
                for recorder in self._recorders:
                    recorder.record(now_s, event, actions)
                for action in actions:
                    self._perform(action)
        finally:
            self._running = False

    def _check_time(self, begun_s: float, took_long: Callable[[float], Event]) -> None:
        now_s = self._clock.now_s()
        if now_s - begun_s >= self._decision_s_max and now_s - self._told_s >= TOLD_APART_S:
            self._told_s = now_s
            self._events.append(took_long(now_s - begun_s))
