"""`weighted-turns`: `llm-mesh`, whose nodes compute in weighted turns instead of by headroom.

An example of a turn rule of one's own. Instances take turns, and one whose tokens follow each other
twice as quickly as the slowest's has two turns for each of the slowest's. A prompt is computed in
chunks of a fixed quota. Shadow validation rolls the rule forward, so that deadlines are still
promised.

    mesh sim workloads/faults.toml --check --policy examples/policies/weighted_turns.py
    mesh up --policy examples/policies/weighted_turns.py

Nodes that are started by hand need the file as well: `mesh node --policy FILE.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.rules.run_queues import RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds, one_iteration

WEIGHT_MAX = 4
"""Turns that the quickest pace may have for one of the slowest."""


@dataclass(frozen=True)
class WeightedTurns:
    """Its fields are its parameters, which nodes are told: numbers, with defaults."""

    chunk_tokens: int = 64
    """The quota of prompt tokens in one turn."""
    name: ClassVar[str] = "weighted_turns"
    period: ClassVar[int | None] = WEIGHT_MAX
    """The turns of an instance repeat after as many as the greatest weight."""

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """The longest wait counts, times the weight. One turn is one iteration: a quota in turns
        lets nobody wait for several.
        """
        paces_s = [queue.tpot_s for queue in queues if queue.tpot_s < inf]
        slowest_s = max(paces_s, default=inf)

        def claim(queue: RunQueue) -> tuple[int, int, str]:
            # An answer of one token has no pace: it has the turns of the slowest.
            ratio = slowest_s / queue.tpot_s if queue.tpot_s < inf else 1.0
            weight = min(max(round(ratio), 1), WEIGHT_MAX)
            return -weight * (queue.passed + 1), -weight, queue.instance_id

        first = min(queues, key=claim)
        passed = [queue for queue in queues if queue is not first]
        tokens = min(first.prompt_tokens, self.chunk_tokens, bounds.prefill_tokens_max)
        return one_iteration(first, tokens, passed)


POLICY = replace(LLM_MESH, name="weighted-turns", rule=WeightedTurns())
