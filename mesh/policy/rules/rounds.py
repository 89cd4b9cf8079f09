"""Turns and weights as in Aegaeon §4: prompts by groups of a model, decodes in weighted rounds.

Prompts come before decodes, one at a time, and those of one model together (algorithm 1). Decodes
go round: each batch computes for a quota of seconds (algorithm 2, equations 2 and 3), and its
weights give way to those whose turn comes next, which are copied meanwhile. A request that brought
its KV blocks along is part of its batch at once. Before: the node core. After: an engine step, or
`Engine.swap`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.policy.rules.swapping import WHOLE, Swap, Weights
from mesh.policy.rules.turns import Grant, TurnBounds, decodes, one_iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingWeights(Weights):
    """The weights of an instance beside what it has to compute."""

    queue: RunQueue | None
    """`None` where it has nothing to compute, or computes now."""


@dataclass(frozen=True)
class Rounds:
    """No deadline is promised by it: what a turn waits for depends on all other batches."""

    quota_s_max: float = 4.0
    """Q_MAX of equation 3, in seconds."""
    alpha_min: float = 0.5
    """The least reciprocal of the estimated SLO attainment of a round: a smaller one would make
    turns longer than deadlines need.
    """
    group_max: int = 8
    """MAX_GPSIZE: prompts of a model in a row while another model has prompts."""
    name: ClassVar[str] = "rounds"
    period: ClassVar[int | None] = 0
    whole: ClassVar[bool] = True

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """The first in order whose weights are on the device; there is one."""
        here = [queue for queue in self._ordered(queues) if not queue.out]
        first, passed = here[0], here[1:]
        prompt = _first_prompt(first)
        if prompt is None:
            tokens = min(first.prompt_tokens, bounds.prefill_tokens_max)
            if tokens:
                return one_iteration(first, tokens, passed)
            return decodes(first, bounds.turn_s_max, passed)
        tokens = min(prompt.left, bounds.prefill_tokens_max)
        return Grant(
            queue=first,
            prefill=((prompt.request_id, tokens),),
            seconds=first.times.prefill_s(tokens, prompt.past),
            passed=passed,
            decode=(),
        )

    def swap(self, weights: Sequence[Weights], free_bytes: int) -> Swap | None:
        """As `Swapping` does by whole weights, by the order of turns in place of deadlines."""
        queues = [each.queue for each in weights if isinstance(each, WorkingWeights) and each.queue]
        places = {q.instance_id: float(n) for n, q in enumerate(self._ordered(queues))}
        placed = [replace(each, due_s=places.get(each.instance_id, inf)) for each in weights]
        return WHOLE.swap(placed, free_bytes)

    def quota_s(self, queue: RunQueue, queues: Sequence[RunQueue]) -> float:
        """Equations 2 and 3: how long a batch decodes before the next. 0 while all weights are on
        the device, since a change costs nothing then.
        """
        batches = [other for other in queues if other.decode_s > 0.0]
        copies_s = sum(other.copy_s for other in batches)
        if not queue.decode_s or not copies_s or not any(other.out for other in queues):
            return 0.0
        paces = {other.instance_id: other.tpot_s / other.decode_s for other in batches}
        share = sum(1.0 / pace for pace in paces.values())
        least = copies_s / (min(paces.values()) * self.quota_s_max)
        alpha = max(least + share, self.alpha_min)
        return copies_s / (paces[queue.instance_id] * (alpha - share))

    def _ordered(self, queues: Sequence[RunQueue]) -> list[RunQueue]:
        """Prompts before decodes; of both the turn under way, then by the first deadline, which is
        that of whoever had its turn longest ago, and last whoever has had its turn.
        """

        def place(queue: RunQueue) -> tuple[bool, int, float, str]:
            prompt, turn = _first_prompt(queue), 1
            if queue.turns and prompt is not None:
                turn = 0 if queue.turns < self.group_max else 2
            elif queue.turns:
                turn = 0 if queue.turns_s < self.quota_s(queue, queues) else 2
            others = (other.due_s for other in queue.prompts)
            due_s = min((queue.due_s, queue.late_s, *others)) if prompt is None else prompt.due_s
            return prompt is None, turn, due_s, queue.instance_id

        return sorted(queues, key=place)


ROUNDS = Rounds()


def _first_prompt(queue: RunQueue) -> Prompt | None:
    """The first due of the prompts whose request has no token yet."""
    first = (prompt for prompt in queue.prompts if prompt.first)
    return min(first, key=lambda prompt: (prompt.due_s, prompt.request_id), default=None)
