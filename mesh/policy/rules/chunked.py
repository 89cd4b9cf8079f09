"""Chunked prefill (PolyServe §2.4, §4.7): an iteration decodes all, and prompts have the rest.

The rest is what a fixed budget of tokens leaves, or what the profile says that fits into the
quickest pace of the batch, or into the time until its first token is due. One baseline has the
first, the others the second, `polyserve-co` the third, and `mesh-slo` that by deadlines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, TypeVar

from mesh.compute.times import Times
from mesh.policy.rules.run_queues import NOBODY, RunQueue
from mesh.policy.rules.turns import Grant, TurnBounds, one_iteration

K = TypeVar("K")


@dataclass(frozen=True)
class Chunked:
    """Prompts are computed in the order of submission."""

    fixed: int = 0
    """1: an iteration has as many tokens, decodes included, as the cell's bound of a chunk says.
    0: it takes no longer than the quickest pace.
    """
    chunk_tokens_min: int = 16
    """The least chunk, also where decodes alone take longer than the pace: prompts have an end."""
    alone_tokens: int = 2048
    """An iteration without decodes has so many: nobody waits for a token (§3.4)."""
    ahead: int = 0
    """1: where all of the batch are further ahead of their deadlines than a pace, an iteration may
    take as long as that.
    """
    apart: int = 0
    """1: where first tokens are due, there is a server for prompts alone."""
    by_due: int = 0
    """1: prompts are computed beside decodes in the order of deadlines, and not of submission. The
    pace is that of those who decode.
    """
    name: ClassVar[str] = "chunked"
    period: ClassVar[int | None] = 0

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """The run queue whose next token is due first computes."""
        queue = min(queues, key=lambda queue: (queue.first_due_s, queue.instance_id))
        passed = [other for other in queues if other is not queue]
        if self.apart and any(prompt.first for prompt in queue.prompts):
            return self._prompts_alone(queue, bounds.prefill_tokens_max, passed)
        if self.by_due and queue.prompts:
            return self._prompts_beside(queue, now_s, bounds.prefill_tokens_max, passed)
        limit_s = max(queue.tpot_s, queue.first_due_s - now_s) if self.ahead else queue.tpot_s
        tokens = self._chunk_tokens(queue, limit_s, bounds.prefill_tokens_max)
        return one_iteration(queue, tokens, passed)

    def shared_out(self, lefts: Iterable[tuple[K, int]], tokens_max: int) -> list[tuple[K, int]]:
        """The tokens that an iteration of prompts alone computes, by what is left of each, in their
        order. One with less than twice the budget left is finished at once if it is the first
        (§4.7).
        """
        left, named = min(self.alone_tokens, tokens_max), list[tuple[K, int]]()
        for key, tokens in lefts:
            whole = not named and left < tokens < 2 * left <= tokens_max
            named.append((key, tokens if whole else min(tokens, left)))
            left -= named[-1][1]
            if left <= 0:
                break
        return named

    def by_deadline(
        self,
        lefts: Sequence[tuple[K, int]],
        *,
        times: Times,
        batch: int,
        past: int,
        spare_s: float,
        tokens_max: int,
    ) -> list[tuple[K, int]]:
        """The same beside `batch` decodes, which the prompts may lengthen by `spare_s`; the first
        of them has `past` tokens in the cache.
        """
        named = self.shared_out(lefts, tokens_max)
        if not batch:
            return named
        most = sum(count for _, count in named)
        fits = times.chunk_tokens(spare_s, past, batch, most)
        left, cut = max(fits, min(most, self.chunk_tokens_min)), list[tuple[K, int]]()
        for key, count in named:
            if left > 0:
                cut.append((key, min(count, left)))
                left -= count
        return cut

    def _prompts_beside(
        self, queue: RunQueue, now_s: float, tokens_max: int, passed: Sequence[RunQueue]
    ) -> Grant:
        """The nearest deadline first, beside all decodes, until one of those is due, or the first
        of the prompts.
        """
        ordered = sorted(queue.prompts, key=lambda of: (of.due_s, of.request_id))
        limit_s = inf
        if queue.batch:
            pace_s = min(part.tpot_s for part in queue.parts)
            limit_s = min(
                max(ordered[0].due_s - now_s, pace_s),
                *[max(min(of.due_s, of.late_s) - now_s, of.tpot_s) for of in queue.parts],
            )
        named = self.by_deadline(
            [(prompt.request_id, prompt.left) for prompt in ordered],
            times=queue.times,
            batch=queue.batch,
            past=ordered[0].past,
            spare_s=limit_s - queue.decode_s,
            tokens_max=tokens_max,
        )
        seconds = queue.turn_s(sum(tokens for _, tokens in named))
        return Grant(queue=queue, prefill=tuple(named), seconds=seconds, passed=passed)

    def _prompts_alone(self, queue: RunQueue, tokens_max: int, passed: Sequence[RunQueue]) -> Grant:
        """The nearest deadline first (§4.2); nobody decodes."""
        ordered = sorted(queue.prompts, key=lambda of: (of.due_s, of.request_id))
        lefts = [(prompt.request_id, prompt.left) for prompt in ordered]
        named = self.shared_out(lefts, tokens_max)
        seconds = queue.times.prefill_s(sum(tokens for _, tokens in named), queue.prompts[0].past)
        return Grant(
            queue=queue, prefill=tuple(named), seconds=seconds, passed=passed, decode=(NOBODY,)
        )

    def _chunk_tokens(self, queue: RunQueue, limit_s: float, tokens_max: int) -> int:
        waiting = queue.prompt_tokens
        if not waiting:
            return 0
        if self.fixed:
            return min(waiting, max(tokens_max - queue.batch, 0 if queue.batch else 1))
        most = min(waiting, tokens_max)
        if not queue.batch:
            return min(most, self.alone_tokens)
        past, spare_s = queue.prompts[0].past, limit_s - queue.decode_s
        fits = queue.times.chunk_tokens(spare_s, past, queue.batch, most)
        return max(fits, min(most, self.chunk_tokens_min))


CHUNKED = Chunked()
AHEAD = Chunked(ahead=1)
BUDGET = Chunked(fixed=1)
BY_DUE = Chunked(by_due=1, chunk_tokens_min=64)
APART = Chunked(apart=1, chunk_tokens_min=128)
"""A server for decodes computes what is left of the last blocks of those who come, all at once."""
