"""The clock port: what time it is, and how to be woken later.

Live, it is the asyncio loop's monotonic clock; in the simulator it is a heap that jumps.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Now(Protocol):
    """What tells the time alone."""

    def now_s(self) -> float: ...


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds. Only differences mean anything."""
        ...

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Run `call` at `at_s`, or as soon as possible when that has passed."""
        ...


class LoopClock:
    """The wall clock, through the running asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self._loop.call_at(at_s, call)
