"""Least headroom first: the token-level scheduling of LLM-Mesh §5.1.

What the paper leaves open is how long a prompt may hold up everybody else: here a prompt is
computed in chunks of the size that the headroom of all running requests leaves room for, and a
request that is late already does not make others late. Nor does the paper have several paces on one
instance: here its classes take turns as if each were an instance where they cannot all decode in
each iteration.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import ClassVar, NamedTuple, Self, TypeGuard

from mesh.policy.rules.decode_capacity import Job, share_of, spare_s
from mesh.policy.rules.run_queues import RunQueue, slack_s
from mesh.policy.rules.turns import Grant, TurnBounds, TurnRule, decodes, one_iteration

EARLY_S = 0.05
"""All classes decode together where every token of the node comes so much early with that, and no
prompt could use the time. In cells whose tokens may take longer to their clients they always do.
"""
IN_TURNS_SHARE = 2.0
"""Decodes of all that would take more of the time than this are out of the question for everybody:
who knows times better does not take them for half as long.
"""


@dataclass(frozen=True)
class Headroom:
    chunk_tokens_min: int = 16
    """Smaller chunks cost more in weights read again than they leave to others."""
    passed_max: int = 8
    """Turns in a row that may go to run queues of more headroom, for their deadlines' sake."""
    selective_decode: int = 0
    """1: classes take turns, as above; 2: in each case, for `ways`. Nodes of earlier versions do
    not know it (`NodeHello.selective_decode`).
    """
    name: ClassVar[str] = "headroom"
    period: ClassVar[int | None] = None

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """Where there are but decodes, a turn has as many of them as take `turn_s_max` together, if
        that leaves everybody as much time again.
        """
        found = by_class(queues, now_s) if self.selective_decode else None
        if found is None or (self.selective_decode == 1 and _decode_together(found, queues, now_s)):
            return self._turn(queues, now_s, bounds)
        grant = self._turn(found.queues, now_s, bounds)
        if grant.queue.of is not None:
            grant.queue, grant.decode = grant.queue.of, tuple(grant.queue.running)
        # Who passes a class that is late passes nobody who waits for its instance's next turn.
        over = [queue for queue in grant.passed if queue.of is None or queue.prompts]
        grant.passed = tuple({id(queue.of or queue): queue.of or queue for queue in over}.values())
        return grant

    def ways(self, queues: Sequence[RunQueue], now_s: float) -> Sequence[Self]:
        """The rules by one of which a node gives this turn, if it sees deadlines up to `EARLY_S`
        earlier, and times down to half as long: this one where that cannot change who decodes.
        """
        found = by_class(queues, now_s) if self.selective_decode else None
        if found is None or share_of(found.together) > IN_TURNS_SHARE:
            return (self,)
        if share_of(found.together) <= 1.0 and not any(queue.prompts for queue in queues):
            if left_s(found.together, now_s) >= 2 * EARLY_S:
                return (self,)
        return replace(self, selective_decode=0), replace(self, selective_decode=2)

    def _turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
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
        owed_s = 0.0  # to classes that are late, before prompts have it
        for queue, has_deadline in _by_deadline(working):
            if has_deadline and not queue.prompts:
                return one_iteration(queue, 0, passed)
            spare_s = slack_s(queue, working, now_s) - owed_s
            tokens = self._chunk_tokens(queue, now_s, spare_s, prefill_tokens_max)
            if queue.of is not None:
                tokens = self._growing_tokens(queue, working, now_s, owed_s, tokens)
            too_often = queue.passed >= self.passed_max
            if too_often and not tokens:
                tokens = min(queue.prompt_tokens, self.chunk_tokens_min, prefill_tokens_max)
            late_fits = queue.late_s < inf and queue.decode_s <= spare_s
            left_out = bool(queue.prompts) and not tokens
            if (left_out or not (tokens or late_fits)) and queue not in passed:
                passed.append(queue)
            if tokens or has_deadline or late_fits or too_often:
                return one_iteration(queue, tokens, passed)
            if queue.of is not None and queue.due_s == inf:
                owed_s += queue.decode_s
        raise AssertionError("with nobody in time to be made late, whoever is first has room")

    def _chunk_tokens(self, queue: RunQueue, now_s: float, limit_s: float, tokens_max: int) -> int:
        """The largest chunk, by halves, with which the iteration takes no longer than `limit_s`."""
        if limit_s <= queue.decode_s:
            return 0
        tokens = _tokens_together(queue, now_s, tokens_max)
        while tokens > 0:
            if queue.turn_s(tokens) <= limit_s:
                return tokens
            tokens = self._half(tokens)
        return 0

    def _growing_tokens(
        self, queue: RunQueue, working: Sequence[RunQueue], now_s: float, owed_s: float, tokens: int
    ) -> int:
        """As much of a chunk that there is time for beside decodes of the classes as they are, as
        there is once its prompts enlarge them. These join classes that do not decode with it.
        """
        while tokens:
            ends = accumulate(prompt.left for prompt in queue.prompts)
            computed = [p for p, end in zip(queue.prompts, ends, strict=True) if end <= tokens]
            if queue.turn_s(tokens) <= slack_s(queue, working, now_s, computed) - owed_s:
                break
            tokens = self._half(tokens)
        return tokens

    def _half(self, tokens: int) -> int:
        return tokens // 2 if tokens // 2 >= self.chunk_tokens_min else 0


HEADROOM = Headroom(selective_decode=1)
TOGETHER = Headroom()
"""All of an instance decode in each iteration."""


def decodes_by_class(rule: TurnRule) -> TypeGuard[Headroom]:
    """Whether the classes of an instance take turns, and promises may count on it. A rule that
    derives from `Headroom` may grant something else.
    """
    return type(rule) is Headroom and rule.selective_decode > 0


def all_together(rule: TurnRule) -> TurnRule:
    """The rule, as a node of an earlier version follows it."""
    return replace(rule, selective_decode=0) if type(rule) is Headroom else rule


class ByClass(NamedTuple):
    """Run queues by class, and the decodes of both ways. A first deadline is infinite where none
    can be kept by a decode of the class alone.
    """

    queues: list[RunQueue]
    together: list[Job]
    in_turns: list[Job]


def by_class(queues: Sequence[RunQueue], now_s: float) -> ByClass | None:
    """`None` where none of the run queues has several classes."""
    if not any(queue.classes for queue in queues):
        return None
    found = ByClass([], [], [])
    for queue in queues:
        of = queue.by_class(now_s)
        found.queues.extend(of)
        if not queue.batch:
            continue
        paces_s = [own.tpot_s for own in of if own is not queue]
        paces_s = paces_s or [part.tpot_s for part in queue.parts if part.batch]
        due_s, tpot_s = min([own.due_s for own in of]), min(paces_s)
        found.together.append((due_s, queue.decode_s, tpot_s))
        found.in_turns.extend(
            [(own.due_s, own.decode_s, max(own.tpot_s, tpot_s)) for own in of if own.batch]
        )
    return found if len(found.queues) > len(queues) else None


def _decode_together(found: ByClass, queues: Sequence[RunQueue], now_s: float) -> bool:
    """Whether all decode in this turn, or one class.

    Either keeps what it can keep: after a turn of decodes there is as much time left by it as
    before. So the one that leaves more time is followed where it matters.
    """
    share, share_in_turns = share_of(found.together), share_of(found.in_turns)
    if share_in_turns > 1.0 and share_in_turns >= share:
        return True
    if share > 1.0:
        return False
    spare = left_s(found.together, now_s)
    wanted = share_in_turns < share and any(queue.prompts for queue in queues)
    return (spare >= EARLY_S and not wanted) or spare >= left_s(found.in_turns, now_s)


def left_s(jobs: list[Job], now_s: float) -> float:
    """The least time that deadlines which can be kept leave over."""
    return spare_s([job for job in jobs if job[0] < inf], now_s)


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
