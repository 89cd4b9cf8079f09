"""Which instance computes next on a node, and how much of its prompts: the turn rules.

Least headroom first is the token-level scheduling of LLM-Mesh §5.1. What the paper leaves open is
how long a prompt may hold up everybody else: here a prompt is computed in chunks of the size that
the headroom of all running requests leaves room for, and a request that is late already does not
make others late. First come, first served, and in turns, are the baselines.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from mesh.domain.reasons import TurnRule
from mesh.request.run_queues import Lane, slack_s

CHUNK_TOKENS_MIN = 16
"""Smaller chunks cost more in weights read again than they leave to others."""
PASSED_MAX = 8
"""Turns in a row that may go to lanes of more headroom, for the sake of their deadlines."""


@dataclass(slots=True, kw_only=True, eq=False)
class Grant:
    """A turn: one iteration of the lane's instance, with so many prompt tokens at most, or several
    decodes in a row.
    """

    lane: Lane
    prefill_tokens: int
    seconds: float
    """Predicted of the whole turn. Its tokens are told at its end."""
    iterations: int = 1
    passed: Sequence[Lane] = ()
    """Lanes that this turn passes over: those of less headroom, and its own if that has prompts of
    which none is computed.
    """


def next_turn(
    lanes: Iterable[Lane],
    now_s: float,
    *,
    prefill_tokens_max: int,
    turn_s_max: float = 0.0,
    rule: TurnRule = TurnRule.HEADROOM,
) -> Grant | None:
    """Who is next, by the rule; None when no lane has work. Ties go to the lesser id.

    Where there are but decodes, a turn has as many of them as take `turn_s_max` together, if that
    leaves everybody as much time again.
    """
    working = [lane for lane in lanes if lane.batch or lane.prompts]
    if not working:
        return None
    if rule is not TurnRule.HEADROOM:
        lane = min(working, key=_PRECEDENCE[rule])
        passed = [other for other in working if other is not lane]
        if not lane.prompts:
            return _decodes(lane, turn_s_max, passed)
        return _grant(lane, min(lane.prompt_tokens, prefill_tokens_max), passed)
    for lane in working:
        if lane.due_s < now_s + lane.decode_s:
            lane.sort_out(now_s)
    first = _first_of_decodes(working)
    if first is None:
        return _least_headroom(working, now_s, prefill_tokens_max)
    if turn_s_max < 2 * first.decode_s:
        return _grant(first, 0, [])
    # Nobody may be late for it, its own first token included, nor come close to it.
    spare_s = slack_s(first, working, now_s) - turn_s_max
    return _decodes(first, min(turn_s_max, spare_s))


_PRECEDENCE: dict[TurnRule, Callable[[Lane], tuple[float, str]]] = {
    TurnRule.FIRST_COME: lambda lane: (lane.oldest_s, lane.instance_id),
    TurnRule.ALTERNATE: lambda lane: (-lane.passed, lane.instance_id),
}


def note_turn(grant: Grant) -> None:
    """Count whom the turn passes over. For the owner of the lanes, once for each turn given."""
    for lane in grant.passed:
        lane.passed += 1
    if grant.prefill_tokens or not grant.lane.prompts:
        grant.lane.passed = 0


def _least_headroom(working: Sequence[Lane], now_s: float, prefill_tokens_max: int) -> Grant:
    """The lane with the earliest deadline. Decodes that can be in time always get their turn; a
    prompt, or a late decode, only as far as it makes nobody late who is not yet, or when it has
    been passed over too often.
    """
    passed: list[Lane] = []
    for lane, has_deadline in _by_deadline(working):
        if has_deadline and not lane.prompts:
            return _grant(lane, 0, passed)
        spare_s = slack_s(lane, working, now_s)
        tokens = _chunk_tokens(lane, now_s, spare_s, prefill_tokens_max)
        too_often = lane.passed >= PASSED_MAX
        if too_often and not tokens:
            tokens = min(lane.prompt_tokens, CHUNK_TOKENS_MIN, prefill_tokens_max)
        late_fits = lane.late_s < inf and lane.decode_s <= spare_s
        left_out = bool(lane.prompts) and not tokens
        if (left_out or not (tokens or late_fits)) and lane not in passed:
            passed.append(lane)
        if tokens or has_deadline or late_fits or too_often:
            return _grant(lane, tokens, passed)
    raise AssertionError("with nobody in time to be made late, whoever is first has room")


def _first_of_decodes(working: Sequence[Lane]) -> Lane | None:
    """The lane with the earliest deadline, if there is nothing but decodes that can be in time, as
    is nearly always so."""
    first = working[0]
    for lane in working:
        if lane.prompts or lane.late_s < inf:
            return None
        if lane.due_s > first.due_s:
            continue
        if lane.due_s < first.due_s or lane.instance_id < first.instance_id:
            first = lane
    return first


def _by_deadline(lanes: Sequence[Lane]) -> Iterable[tuple[Lane, bool]]:
    """Lanes by the deadlines in them, and whether it is one that a decode can still keep. A lane
    with both kinds comes twice.
    """
    if len(lanes) == 1 and lanes[0].due_s < inf:
        return ((lanes[0], True),)
    jobs = [(lane.due_s, lane.instance_id, True, lane) for lane in lanes if lane.due_s < inf]
    for lane in lanes:
        if lane.prompts or lane.late_s < inf:
            due_s = min((prompt.due_s for prompt in lane.prompts), default=inf)
            jobs.append((min(due_s, lane.late_s), lane.instance_id, False, lane))
    jobs.sort(key=_deadline_and_id)
    return [(lane, has_deadline) for _, _, has_deadline, lane in jobs]


def _deadline_and_id(job: tuple[float, str, bool, Lane]) -> tuple[float, str, bool]:
    return job[:3]


def _grant(lane: Lane, tokens: int, passed: Sequence[Lane] = ()) -> Grant:
    return Grant(lane=lane, prefill_tokens=tokens, seconds=lane.turn_s(tokens), passed=passed)


def _decodes(lane: Lane, limit_s: float, passed: Sequence[Lane] = ()) -> Grant:
    """As many decodes as take no longer than the limit, but one at least."""
    iterations = max(int(limit_s / lane.decode_s), 1) if lane.decode_s > 0.0 else 1
    seconds = iterations * lane.decode_s
    return Grant(lane=lane, prefill_tokens=0, seconds=seconds, iterations=iterations, passed=passed)


def _chunk_tokens(lane: Lane, now_s: float, limit_s: float, tokens_max: int) -> int:
    """The largest chunk, by halves, with which the iteration takes no longer than `limit_s`."""
    if limit_s <= lane.decode_s:
        return 0
    tokens = _tokens_together(lane, now_s, tokens_max)
    while tokens > 0:
        if lane.turn_s(tokens) <= limit_s:
            return tokens
        tokens = tokens // 2 if tokens // 2 >= CHUNK_TOKENS_MIN else 0
    return 0


def _tokens_together(lane: Lane, now_s: float, tokens_max: int) -> int:
    """As many prompt tokens as an iteration may have, of several prompts if those that end in it
    are not late on account of those that come after them.
    """
    tokens = min(lane.prompt_tokens, tokens_max)
    end = 0
    for prompt in lane.prompts:
        end += prompt.left
        if end >= tokens:
            break
        if now_s + lane.turn_s(end) <= prompt.due_s < now_s + lane.turn_s(tokens):
            return end
    return tokens
