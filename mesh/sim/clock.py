"""Time that jumps: a heap of calls, made in the order of their times.

It owns the only notion of time in a simulation. Calls due at the same time are made in the order in
which they were asked for, so that a run is the same each time. See `mesh.runtime.clock.Clock`.
"""

from collections.abc import Callable
from heapq import heappop, heappush


class HeapClock:
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self._now_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        now_s = self._now_s
        heappush(self._heap, (at_s if at_s > now_s else now_s, self._sequence, call))

    def step(self) -> bool:
        """Jump to the next call and make it; False when there is none."""
        if not self._heap:
            return False
        self._now_s, _, call = heappop(self._heap)
        call()
        return True

    def run_until(self, until_s: float) -> None:
        """Make all calls that are due until then, and stand at `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            self.step()
        self._now_s = max(self._now_s, until_s)

    def advance(self, by_s: float) -> None:
        self.run_until(self._now_s + by_s)
