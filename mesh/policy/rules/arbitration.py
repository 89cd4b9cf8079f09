"""Prompts by slack, as in Prism §6.2 (algorithm 2): a node's prompts are one queue, which
Moore-Hodgson orders so that as many as possible are in time.

Every other turn computes the first prompt of that order, beside the decodes of its instance; the
turns between go round, to the instance whose last one is longest ago. Before: the node core. After:
an engine step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds, decodes


@dataclass(frozen=True)
class Arbitration:
    """No deadline is promised by it: a prompt that would be late gives way to all others."""

    name: ClassVar[str] = "arbitration"
    period: ClassVar[int | None] = 0

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        prompts = [(prompt, queue) for queue in queues for prompt in queue.prompts]
        head, owner = first_in_time(prompts, now_s, bounds.prefill_tokens_max) or (None, None)
        decoding = [queue for queue in queues if queue.batch]
        longest = min(decoding, key=lambda q: (-q.passed, q.instance_id), default=None)
        if head is None or owner is None or (longest and not owner.passed and owner is not longest):
            assert longest is not None, "who has no prompt decodes"
            return decodes(longest, bounds.turn_s_max, _others(longest, queues))
        tokens = min(head.left, bounds.prefill_tokens_max)
        return Grant(
            queue=owner,
            prefill=((head.request_id, tokens),),
            seconds=owner.turn_s(tokens),
            passed=_others(owner, queues),
        )


ARBITRATION = Arbitration()


def first_in_time(
    prompts: Sequence[tuple[Prompt, RunQueue]], now_s: float, prefill_tokens_max: int
) -> tuple[Prompt, RunQueue] | None:
    """The first of the most prompts that can be in time, each alone and in the largest chunks; of
    those that cannot be, the first due. `None` where there is none.
    """
    ordered = sorted(prompts, key=lambda of: (of[0].due_s, of[0].request_id))
    end_s, longest, dropped = now_s, list[tuple[float, int]](), set[int]()
    for number, (prompt, queue) in enumerate(ordered):
        seconds = queue.at_once_s(prompt, prefill_tokens_max)
        end_s += seconds
        heappush(longest, (-seconds, number))
        if end_s > prompt.due_s:
            less_s, last = heappop(longest)
            end_s += less_s
            dropped.add(last)
    kept = [of for number, of in enumerate(ordered) if number not in dropped]
    return next(iter(kept or ordered), None)


def _others(queue: RunQueue, queues: Sequence[RunQueue]) -> list[RunQueue]:
    return [other for other in queues if other is not queue]
