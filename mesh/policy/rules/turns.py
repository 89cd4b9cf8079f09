"""What a turn rule is asked and what it answers.

The node core asks before every turn, and shadow validation asks the same rule about turns to come.
Before: run queues, filled by who asks. After: an engine step, or the next turn of a forecast.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any, ClassVar, NamedTuple, Protocol

from mesh.compute.times import Times
from mesh.domain.ids import RequestId
from mesh.domain.node_rule import RuleName
from mesh.domain.steps import Prefill
from mesh.domain.values import dataclass
from mesh.policy.rules.run_queues import NOBODY, RunQueue, slack_s

BEST_EFFORT_S, BEST_EFFORT_TOKENS_MIN = 0.1, 16
"""How long the prompt tokens of an iteration of best effort take by the profile, at the beginning
of a prompt, unless these few take longer. Each forecast counts on such an iteration, since one may
just have begun.
"""
AHEAD_CHUNKS = 16
"""Best effort has a turn beside requests with limits while these are ahead by the time of so many
of the longest chunks of a prompt. Who is ahead ends sooner, which leaves time for who comes next;
docs/classes.md says what other numbers cost.
"""


def best_effort_tokens(times: Times, most: int) -> int:
    """The prompt tokens of an iteration of best effort, `most` at most: by the profile alone, so
    that node and controller, whose corrections differ, know the same number.
    """
    tokens = times.chunk_tokens(BEST_EFFORT_S * times.factor, 0, 0, most)
    return max(tokens, min(BEST_EFFORT_TOKENS_MIN, most))


@dataclass(slots=True, kw_only=True, eq=False)
class Grant:
    """A turn: one iteration of the run queue's instance, or several decodes in a row."""

    queue: RunQueue
    prefill: Prefill
    """Prompt tokens that it computes at most, of all prompts or of each that is named."""
    seconds: float
    """The predicted time of the whole turn, whose tokens are told at its end."""
    iterations: int = 1
    passed: Sequence[RunQueue] = ()
    """Run queues that this turn passes over; its own where that has to wait all the same."""
    decode: tuple[RequestId, ...] | None = None
    """Who gets a token; None: everybody past the prompt."""

    @property
    def prefill_tokens(self) -> int:
        """The prompt tokens that it computes at most."""
        if isinstance(self.prefill, int):
            return self.prefill
        return sum(tokens for _, tokens in self.prefill)


class TurnBounds(NamedTuple):
    """What a turn may not go beyond."""

    prefill_tokens_max: int
    """Prompt tokens of an iteration."""
    turn_s_max: float
    """Seconds of several decodes together."""


class TurnRule(Protocol):
    """A frozen dataclass whose fields, all of them numbers, are its parameters. It has no state, no
    clock and no dice; what it may remember is `RunQueue.passed`.
    """

    name: ClassVar[str]
    period: ClassVar[int | None]
    """Turns of a run queue after which its decodes repeat while nobody comes or goes: by as many,
    shadow validation sees that nobody falls behind. None: all of a run queue decode, by their
    deadlines, and `decode_capacity` tells. 0: no policy can promise by this rule.
    """

    def turn(self, queues: Sequence[RunQueue], now_s: float, bounds: TurnBounds) -> Grant:
        """Who is next of run queues that all have work, one at least. Ties go to the lesser id. A
        rule that has `whole = True` is shown those without weights on the device, too
        (`RunQueue.out`), of which none can be next.
        """
        ...


def next_turn(
    rule: TurnRule,
    queues: Iterable[RunQueue],
    now_s: float,
    *,
    prefill_tokens_max: int,
    turn_s_max: float = 0.0,
) -> Grant | None:
    """Who is next, by the rule; None when no run queue has work."""
    working = [queue for queue in queues if queue.batch or queue.prompts]
    for queue in working:
        if not queue.out:
            return rule.turn(working, now_s, TurnBounds(prefill_tokens_max, turn_s_max))
    return None


def note_turn(grant: Grant) -> None:
    """Count whom the turn passes over. For the owner of the run queues, once for each
    turn given.
    """
    for queue in grant.passed:
        queue.passed += 1
    if grant.prefill or not grant.queue.prompts or grant.queue not in grant.passed:
        grant.queue.passed = 0


def may_wait(rule: TurnRule, queues: Sequence[RunQueue]) -> bool:
    """Whether requests with limits may wait for best effort at all: where the rule goes by
    deadlines, and all of them decode, none late, in no more time than passes.
    """
    if rule.period is not None or any(queue.prompts or queue.late_s < inf for queue in queues):
        return False
    return sum(queue.decode_s / queue.tpot_s for queue in queues if queue.batch) <= 1.0


def leaves_time(
    grant: Grant, queues: Sequence[RunQueue], now_s: float, prefill_tokens_max: int
) -> bool:
    """Whether an iteration of best effort may come before those of requests that may wait: none
    comes nearer to a late token by it, now or later, than `AHEAD_CHUNKS` say.
    """
    chunk_s = max(queue.times.prefill_s(prefill_tokens_max, 0) for queue in queues)
    return grant.seconds + AHEAD_CHUNKS * chunk_s <= slack_s(grant.queue, queues, now_s)


def name_all(grant: Grant) -> None:
    """Name who takes part, of an instance that has other requests beside its run queue."""
    queue, left = grant.queue, grant.prefill_tokens
    if grant.decode is None:
        grant.decode = tuple(queue.running) or (NOBODY,)
    if isinstance(grant.prefill, int):
        named = []
        for prompt in queue.prompts:
            tokens = min(prompt.left, left)
            if tokens:
                named.append((prompt.request_id, tokens))
                left -= tokens
        grant.prefill = tuple(named) if named else 0


def one_iteration(queue: RunQueue, tokens: int, passed: Sequence[RunQueue] = ()) -> Grant:
    """A decode of the whole batch, beside so many prompt tokens."""
    return Grant(queue=queue, prefill=tokens, seconds=queue.turn_s(tokens), passed=passed)


def decodes(queue: RunQueue, limit_s: float, passed: Sequence[RunQueue] = ()) -> Grant:
    """As many decodes as take no longer than the limit, but one at least."""
    iterations = max(int(limit_s / queue.decode_s), 1) if queue.decode_s > 0.0 else 1
    seconds = iterations * queue.decode_s
    return Grant(queue=queue, prefill=0, seconds=seconds, iterations=iterations, passed=passed)


def whole_turn(queue: RunQueue, queues: Sequence[RunQueue], bounds: TurnBounds) -> Grant:
    """All that the chosen run queue may compute in a turn; the others are passed over."""
    passed = [other for other in queues if other is not queue]
    if queue.prompts:
        return one_iteration(queue, min(queue.prompt_tokens, bounds.prefill_tokens_max), passed)
    return decodes(queue, bounds.turn_s_max, passed)


def name_of(rule: TurnRule) -> RuleName:
    """What nodes are told of it, but for parameters with their defaults: earlier versions may not
    know these, and to them they mean what they did. A rule from a policy file has the file's digest
    as `digest`, which whoever reads the file sets (`mesh.runtime.policies`).
    """
    whole: Any = rule
    named = fields(whole) if is_dataclass(whole) else ()
    return RuleName(
        name=rule.name,
        parameters=tuple(
            [
                (field.name, getattr(rule, field.name))
                for field in named
                if getattr(rule, field.name) != field.default
            ]
        ),
        digest=getattr(rule, "digest", ""),
    )
