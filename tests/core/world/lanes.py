"""A node's lanes, whose calls run when the test says so."""

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mesh.domain.errors import MeshError
from mesh.domain.node_events import NodeEvent
from mesh.runtime.node_actions import Lane

R = TypeVar("R")


class QueuedLanes:
    """Engine calls wait until the test runs them, one at a time."""

    def __init__(self) -> None:
        self.waiting: dict[Lane, deque[Callable[[], None]]] = {lane: deque() for lane in Lane}
        self.post: Callable[[NodeEvent], None] = lambda event: None

    def run(
        self,
        lane: Lane,
        call: Callable[[], R],
        done: Callable[[R | MeshError], NodeEvent | None],
    ) -> None:
        def one() -> None:
            result: R | MeshError
            try:
                result = call()
            except MeshError as error:
                result = error
            event = done(result)
            if event is not None:
                self.post(event)

        self.waiting[lane].append(one)

    def post_soon(self, event: NodeEvent) -> None:
        self.post(event)

    def run_one(self, lane: Lane) -> bool:
        if not self.waiting[lane]:
            return False
        self.waiting[lane].popleft()()
        return True
