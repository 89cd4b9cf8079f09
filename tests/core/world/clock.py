"""Time that moves only when it is told to."""

import heapq
from collections.abc import Callable


class HeapClock:
    """See `mesh.runtime.clock.Clock`."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def now_s(self) -> float:
        return self.at_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, call))

    def advance(self, by_s: float) -> None:
        self.advance_to(self.at_s + by_s)

    def advance_to(self, until_s: float) -> None:
        """Make the calls that are due until then, each at its time."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, call = heapq.heappop(self._heap)
            self.at_s = max(self.at_s, at_s)
            call()
        self.at_s = until_s
