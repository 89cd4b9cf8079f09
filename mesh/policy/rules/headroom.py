"""Least headroom first: the token-level scheduling of LLM-Mesh §5.1.

What the paper leaves open is how long a prompt may hold up everybody else: here a prompt is
computed in chunks of the size that the headroom of all running requests leaves room for, and a
request that is late already does not make others late. Nor does the paper have several paces on
one instance: here the quickest decodes in each iteration, and requests of slower paces are left out
of those that would make somebody late with them, until their own tokens are due.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from mesh.policy.rules.run_queues import PaceClass, RunQueue, slack_s
from mesh.policy.rules.turns import Grant, TurnBounds, TurnRule, decodes, one_iteration

EARLY_S_MAX = 0.05
"""Where a class decodes before it has to, all tokens come so much early, or a quarter of the
largest pace if that is less: validation has promised them so much earlier than due at most
(`decode_margin_s`) in cells whose deliveries take no longer. In others all decode each time.
"""
Parts = Sequence[PaceClass] | None
"""The classes of a run queue that decode; `None`: all that it has."""


@dataclass(frozen=True)
class Headroom:
    chunk_tokens_min: int = 16
    """Smaller chunks cost more in weights read again than they leave to others."""
    passed_max: int = 8
    """Turns in a row that may go to run queues of more headroom, for their deadlines' sake."""
    selective_decode: int = 0
    """1: requests of a slower pace are left out of decodes, as above. Nodes of earlier versions do
    not know it (`NodeHello.selective_decode`).
    """
    name: ClassVar[str] = "headroom"
    period: ClassVar[int | None] = None

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """Where there are but decodes, a turn has as many of them as take `turn_s_max` together, if
        that leaves everybody as much time again.
        """
        for queue in queues:
            if queue.due_s < now_s + queue.decode_s:
                queue.sort_out(now_s, by_class=self.selective_decode > 0)
        first = _first_of_decodes(queues)
        if first is None:
            return self._least_headroom(queues, now_s, bounds.prefill_tokens_max)
        parts = self._decoding(first, queues, now_s) if first.classes else None
        if parts is not None or bounds.turn_s_max < 2 * first.decode_s:
            return one_iteration(first, 0, parts=parts)
        # Nobody may be late for it, its own first token included, nor come close to it.
        by_class, turn_s = self.selective_decode > 0, bounds.turn_s_max
        slack = slack_s(first, queues, now_s, by_class=by_class, early_s_max=EARLY_S_MAX)
        return decodes(first, min(turn_s, slack - turn_s))

    def _least_headroom(
        self, working: Sequence[RunQueue], now_s: float, prefill_tokens_max: int
    ) -> Grant:
        """The run queue with the earliest deadline. Decodes that can be in time always get their
        turn; a prompt, or a late decode, only as far as it makes nobody late who is not yet, or
        when it has been passed over too often.
        """
        passed: list[RunQueue] = []
        by_class = self.selective_decode > 0
        for queue, has_deadline in _by_deadline(working):
            mixed = by_class and len(queue.classes) > 1
            parts: Parts = None
            tokens = 0
            if mixed and queue.prompts:
                # Those who are not due yet leave their time to the prompts.
                parts = queue.due_classes(now_s)
                spare_s = slack_s(queue, working, now_s, by_class=by_class, parts=parts)
                tokens = self._chunk_tokens(queue, now_s, spare_s, prefill_tokens_max, parts)
            if mixed and not tokens:
                parts = self._decoding(queue, working, now_s)
            if has_deadline and not queue.prompts:
                return one_iteration(queue, 0, passed, parts)
            if not tokens:
                spare_s = slack_s(queue, working, now_s, by_class=by_class, parts=parts)
                tokens = self._chunk_tokens(queue, now_s, spare_s, prefill_tokens_max, parts)
            too_often = queue.passed >= self.passed_max
            if too_often and not tokens:
                tokens = min(queue.prompt_tokens, self.chunk_tokens_min, prefill_tokens_max)
            late = queue.late_s if parts is None else min([part.late_s for part in parts])
            late_fits = late < inf and queue.turn_s(0, parts) <= spare_s
            left_out = bool(queue.prompts) and not tokens
            if (left_out or not (tokens or late_fits)) and queue not in passed:
                passed.append(queue)
            if tokens or has_deadline or late_fits or too_often:
                return one_iteration(queue, tokens, passed, parts)
        raise AssertionError("with nobody in time to be made late, whoever is first has room")

    def _decoding(self, queue: RunQueue, queues: Sequence[RunQueue], now_s: float) -> Parts:
        """Who decodes where no prompt is computed beside it: all, where that makes nobody late and
        none of the quickest class is so already; else those who are due, with those who are late if
        there is time for them, too.
        """
        if not self.selective_decode or len(queue.classes) < 2:
            return None
        parts = queue.due_classes(now_s)
        if parts is None:
            return None
        first = parts[0]
        spare_s = slack_s(queue, queues, now_s, by_class=True, early_s_max=EARLY_S_MAX)
        if first.late_s == inf and queue.decode_s <= spare_s:
            return None
        late = [part for part in queue.classes if part.late_s < inf and part not in parts]
        if first.late_s < inf:  # It may be so for long, if it waits for KV blocks.
            late = [part for part in late if part.late_s + part.tpot_s < now_s]
        more = [*parts, *late]
        if late:
            most_s = EARLY_S_MAX
            spare_s = slack_s(queue, queues, now_s, by_class=True, parts=more, early_s_max=most_s)
            if queue.decode_s_by(more) <= spare_s:
                return more
        return parts

    def _chunk_tokens(
        self, queue: RunQueue, now_s: float, limit_s: float, tokens_max: int, parts: Parts
    ) -> int:
        """The largest chunk, by halves, with which the iteration takes no longer than `limit_s`."""
        if limit_s <= queue.turn_s(0, parts):
            return 0
        tokens = _tokens_together(queue, now_s, tokens_max, parts)
        while tokens > 0:
            if queue.turn_s(tokens, parts) <= limit_s:
                return tokens
            tokens = tokens // 2 if tokens // 2 >= self.chunk_tokens_min else 0
        return 0


HEADROOM = Headroom(selective_decode=1)
TOGETHER = Headroom()
"""All of an instance decode in each iteration."""


def decodes_by_class(rule: TurnRule) -> bool:
    """Whether requests of a slower pace are left out of decodes and promises may count on it. A
    rule that derives from `Headroom` may grant something else.
    """
    return type(rule) is Headroom and rule.selective_decode > 0


def all_together(rule: TurnRule) -> TurnRule:
    """The rule, as a node of an earlier version follows it."""
    return replace(rule, selective_decode=0) if type(rule) is Headroom else rule


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


def _tokens_together(queue: RunQueue, now_s: float, tokens_max: int, parts: Parts) -> int:
    """As many prompt tokens as an iteration may have, of several prompts if those that end in it
    are not late on account of those that come after them.
    """
    tokens = min(queue.prompt_tokens, tokens_max)
    if not tokens:
        return 0
    end, end_s = 0, now_s + queue.turn_s(tokens, parts)
    for prompt in queue.prompts:
        end += prompt.left
        if end >= tokens:
            break
        if prompt.due_s < end_s and now_s + queue.turn_s(end, parts) <= prompt.due_s:
            return end
    return tokens
