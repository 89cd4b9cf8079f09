"""Instances in turns: the one whose last turn is longest ago computes next. A baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds, whole_turn


@dataclass(frozen=True)
class Alternate:
    """Equal shares of the node: each instance has one turn in every round."""

    name: ClassVar[str] = "alternate"
    period: ClassVar[int | None] = 1

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        queue = min(queues, key=lambda queue: (-queue.passed, queue.instance_id))
        return whole_turn(queue, queues, bounds)


ALTERNATE = Alternate()
