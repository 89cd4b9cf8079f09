"""`weighted-turns`: `llm-mesh`, whose nodes compute in weighted turns instead of by headroom.

An example of a turn rule of one's own. Instances take turns, and one whose tokens follow each other
twice as quickly as another's has two turns for each of the other's. A prompt is computed in chunks
of a fixed quota. Shadow validation rolls the rule forward, so that deadlines are still promised.

    mesh sim workloads/faults.toml --check --policy examples/policies/weighted_turns.py
    mesh up --policy examples/policies/weighted_turns.py

Nodes that are started by hand need the file as well: `mesh node --policy FILE.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds, one_iteration


@dataclass(frozen=True)
class WeightedTurns:
    """Its fields are its parameters, which nodes are told: numbers, with defaults."""

    weight_max: int = 4
    """Turns that the quickest pace may have for one of the slowest."""
    chunk_tokens: int = 64
    """The quota of prompt tokens in one turn."""
    name: ClassVar[str] = "weighted_turns"
    period: ClassVar[int | None] = 4
    """With weights up to 4, the turns of an instance repeat after as many."""

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """The longest wait counts, times the weight. One turn is one iteration: a quota in turns
        lets nobody wait for several.
        """
        slowest_s = max(queue.tpot_s for queue in queues)
        first = min(queues, key=lambda queue: (-self._claim(queue, slowest_s), queue.instance_id))
        passed = [queue for queue in queues if queue is not first]
        tokens = min(first.prompt_tokens, self.chunk_tokens, bounds.prefill_tokens_max)
        return one_iteration(first, tokens, passed)

    def _claim(self, queue: RunQueue, slowest_s: float) -> int:
        weight = min(round(slowest_s / queue.tpot_s), self.weight_max)
        return (queue.passed + 1) * weight


POLICY = replace(LLM_MESH, name="weighted-turns", rule=WeightedTurns())
