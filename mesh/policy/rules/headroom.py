"""Least headroom first: the token-level scheduling of LLM-Mesh §5.1.

What the paper leaves open is how long a prompt may hold up everybody else: here a prompt is
computed in chunks of the size that the headroom of all running requests leaves room for, and a
request that is late already does not make others late.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from mesh.policy.rules.run_queues import RunQueue, slack_s
from mesh.policy.rules.turns import Grant, TurnBounds, decodes, one_iteration


@dataclass(frozen=True)
class Headroom:
    chunk_tokens_min: int = 16
    """Smaller chunks cost more in weights read again than they leave to others."""
    passed_max: int = 8
    """Turns in a row that may go to run queues of more headroom, for their deadlines' sake."""
    name: ClassVar[str] = "headroom"
    period: ClassVar[int | None] = None

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """Where there are but decodes, a turn has as many of them as take `turn_s_max` together, if
        that leaves everybody as much time again.
        """
        for queue in queues:
            if queue.due_s < now_s + queue.decode_s:
                queue.sort_out(now_s)
        first = _first_of_decodes(queues)
        if first is None:
            return self._least_headroom(queues, now_s, bounds.prefill_tokens_max)
        if bounds.turn_s_max < 2 * first.decode_s:
            return one_iteration(first, 0)
        # Nobody may be late for it, its own first token included, nor come close to it.
        spare_s = slack_s(first, queues, now_s) - bounds.turn_s_max
        return decodes(first, min(bounds.turn_s_max, spare_s))

    def _least_headroom(
        self, working: Sequence[RunQueue], now_s: float, prefill_tokens_max: int
    ) -> Grant:
        """The run queue with the earliest deadline. Decodes that can be in time always get their
        turn; a prompt, or a late decode, only as far as it makes nobody late who is not yet, or
        when it has been passed over too often.
        """
        passed: list[RunQueue] = []
        for queue, has_deadline in _by_deadline(working):
            if has_deadline and not queue.prompts:
                return one_iteration(queue, 0, passed)
            spare_s = slack_s(queue, working, now_s)
            tokens = self._chunk_tokens(queue, now_s, spare_s, prefill_tokens_max)
            too_often = queue.passed >= self.passed_max
            if too_often and not tokens:
                tokens = min(queue.prompt_tokens, self.chunk_tokens_min, prefill_tokens_max)
            late_fits = queue.late_s < inf and queue.decode_s <= spare_s
            left_out = bool(queue.prompts) and not tokens
            if (left_out or not (tokens or late_fits)) and queue not in passed:
                passed.append(queue)
            if tokens or has_deadline or late_fits or too_often:
                return one_iteration(queue, tokens, passed)
        raise AssertionError("with nobody in time to be made late, whoever is first has room")

    def _chunk_tokens(self, queue: RunQueue, now_s: float, limit_s: float, tokens_max: int) -> int:
        """The largest chunk, by halves, with which the iteration takes no longer than `limit_s`."""
        if limit_s <= queue.decode_s:
            return 0
        tokens = _tokens_together(queue, now_s, tokens_max)
        while tokens > 0:
            if queue.turn_s(tokens) <= limit_s:
                return tokens
            tokens = tokens // 2 if tokens // 2 >= self.chunk_tokens_min else 0
        return 0


HEADROOM = Headroom()


def _first_of_decodes(working: Sequence[RunQueue]) -> RunQueue | None:
    """The run queue with the earliest deadline, if there is nothing but decodes that can be in
    time, as is nearly always so.
    """
    first = working[0]
    for queue in working:
        if queue.prompts or queue.late_s < inf:
            return None
        if queue.due_s > first.due_s:
            continue
        if queue.due_s < first.due_s or queue.instance_id < first.instance_id:
            first = queue
    return first


def _by_deadline(queues: Sequence[RunQueue]) -> Iterable[tuple[RunQueue, bool]]:
    """Run queues by the deadlines in them, and whether it is one that a decode can still keep. A
    run queue with both kinds comes twice.
    """
    if len(queues) == 1 and queues[0].due_s < inf:
        return ((queues[0], True),)
    jobs = [(queue.due_s, queue.instance_id, True, queue) for queue in queues if queue.due_s < inf]
    for queue in queues:
        if queue.prompts or queue.late_s < inf:
            due_s = queue.late_s
            for prompt in queue.prompts:
                if prompt.due_s < due_s:
                    due_s = prompt.due_s
            jobs.append((due_s, queue.instance_id, False, queue))
    jobs.sort()  # no two agree in all that comes before the run queue
    return [(queue, has_deadline) for _, _, has_deadline, queue in jobs]


def _tokens_together(queue: RunQueue, now_s: float, tokens_max: int) -> int:
    """As many prompt tokens as an iteration may have, of several prompts if those that end in it
    are not late on account of those that come after them.
    """
    tokens = min(queue.prompt_tokens, tokens_max)
    if not tokens:
        return 0
    end, end_s = 0, now_s + queue.turn_s(tokens)
    for prompt in queue.prompts:
        end += prompt.left
        if end >= tokens:
            break
        if prompt.due_s < end_s and now_s + queue.turn_s(end) <= prompt.due_s:
            return end
    return tokens
