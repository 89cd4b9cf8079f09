"""First come, first served: the instance with the oldest request computes next. A baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds, whole_turn


@dataclass(frozen=True)
class FirstCome:
    """It leaves everybody else waiting until the oldest request has ended: nothing can be promised
    by it.
    """

    name: ClassVar[str] = "first_come"
    period: ClassVar[int | None] = 0

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        queue = min(queues, key=lambda queue: (queue.oldest_s, queue.instance_id))
        return whole_turn(queue, queues, bounds)


FIRST_COME = FirstCome()
