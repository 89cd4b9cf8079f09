"""Shadow validation: would this request, here, keep every SLO? (LLM-Mesh §5.3)

The request is put into a copy of one node's schedule, which is rolled forward by the turn rule that
the node itself follows, until nothing can go wrong any more. Before: the policy's order of
candidates. After: the request is submitted, or the next candidate is tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mesh.request.lanes import Lane, Prompt
from mesh.request.turns import Grant, next_turn

OVERESTIMATE = 1.1
"""Of every iteration (LLM-Mesh §5.3): the caller puts it into the lanes' times."""
LOOKAHEAD_TOKENS = 64
"""Contexts count as if they had grown by so much already: every token makes them longer."""
STEPS_MAX = 512
"""Iterations that a schedule is rolled forward; what is not settled by then is refused."""


class Verdict(StrEnum):
    """What validation found; the three refusals are the three cases of LLM-Mesh §5.3, figure 6."""

    PASSES = "passes"
    FIRST_TOKEN_LATE = "first_token_late"
    """1: the request's own first token would come after its deadline."""
    DELAYS_RUNNING = "delays_running"
    """2: a token of another request would come after its deadline, on account of this one."""
    TPOT_EXCEEDED = "tpot_exceeded"
    """3: one decode of every instance of the node takes longer than the TPOT SLO allows."""


@dataclass(slots=True, kw_only=True, eq=False)
class Schedule:
    """A node's work, copied for one validation, which changes it. The lanes' times hold the
    correction and the overestimate.
    """

    lanes: list[Lane]
    now_s: float
    prefill_tokens_max: int
    started_s: float | None = None
    """When the iteration in flight began; None when there is none."""
    joining: Sequence[tuple[Lane, Prompt]] = ()
    """Requests submitted since then: they take part from the next iteration on."""
    slowdown: float = 1.0
    """Of iterations that begin before `slow_until_s`: a load computes beside them."""
    slow_until_s: float = 0.0
    margin_s: float = 0.0
    """From the end of an iteration until its tokens are with their clients."""


@dataclass(slots=True, kw_only=True, eq=False)
class Newcomer:
    """The request to validate, on its way to `lane`, which may be a new one."""

    lane: Lane
    prompt: Prompt
    joins_s: float
    """When it can start: now, or once its instance is loaded."""
    may_be_late: bool = False
    """It was admitted before, and its deadline has been missed or is about to be."""


def validate(schedule: Schedule, newcomer: Newcomer) -> Verdict:
    """Whether the newcomer can be taken, or which of the three cases forbids it."""
    lanes = schedule.lanes
    if newcomer.lane not in lanes:
        lanes.append(newcomer.lane)
    settled_s = _final_decodes(schedule, newcomer)
    if sum(decode_s / lane.tpot_s for lane, decode_s in settled_s) > 1.0:
        return Verdict.TPOT_EXCEEDED
    for lane in lanes:
        lane.predict(LOOKAHEAD_TOKENS)
    now_s = _finish_in_flight(schedule)
    for lane, prompt in schedule.joining:
        lane.prompts.append(prompt)
    return _Rollout(schedule, newcomer, settled_s, now_s).run()


def _final_decodes(schedule: Schedule, newcomer: Newcomer) -> list[tuple[Lane, float]]:
    """Seconds of a decode of each lane once all in it, the newcomer too, are past their prompts."""
    coming: dict[int, list[Prompt]] = {id(newcomer.lane): [newcomer.prompt]}
    for lane, prompt in schedule.joining:
        coming.setdefault(id(lane), []).append(prompt)
    result = []
    for lane in schedule.lanes:
        prompts = lane.prompts + coming.get(id(lane), [])
        batch = lane.batch + len(prompts)
        if batch:
            tokens = lane.context_tokens + sum(prompt.left + prompt.past for prompt in prompts)
            result.append((lane, lane.times.decode_s(batch, tokens / batch + LOOKAHEAD_TOKENS)))
    return result


def _finish_in_flight(schedule: Schedule) -> float:
    """Complete the iteration in flight; when it ends. Whom it makes late, it makes late anyway."""
    if schedule.started_s is None:
        return schedule.now_s
    grant = next_turn(
        schedule.lanes, schedule.started_s, prefill_tokens_max=schedule.prefill_tokens_max
    )
    if grant is None:
        return schedule.now_s
    end_s = max(schedule.now_s, schedule.started_s + grant.seconds * schedule.slowdown)
    _advance(grant, schedule.started_s, end_s, end_s)
    return end_s


def _advance(grant: Grant, start_s: float, end_s: float, seen_s: float) -> "list[Prompt] | None":
    """Carry an iteration out: the prompts that it completes. None when it makes the decodes of its
    lane late, which could have been in time at its start. Tokens are with their clients at
    `seen_s`.
    """
    lane = grant.lane
    in_time = True
    if lane.batch:
        in_time = seen_s <= lane.due_s or lane.due_s < start_s
        # Whoever is late continues at the pace of the SLO from there.
        late = lane.late_s <= end_s or not in_time
        lane.due_s = (min(lane.due_s, end_s) if late else lane.due_s) + lane.tpot_s
        lane.late_s = float("inf")
    done = _compute_prompts(lane, grant.prefill_tokens)
    for prompt in done:
        lane.batch += 1
        lane.context_tokens += prompt.past
        lane.due_s = min(lane.due_s, max(prompt.due_s, start_s) + lane.tpot_s)
    if done:
        lane.predict(LOOKAHEAD_TOKENS)
    for passed in grant.passed:
        passed.passed += 1
    if grant.prefill_tokens or not lane.prompts:
        lane.passed = 0
    return done if in_time else None


def _compute_prompts(lane: Lane, tokens: int) -> list[Prompt]:
    """Compute so many prompt tokens, in the order of submission; the prompts that this ends."""
    done = []
    while tokens > 0 and lane.prompts:
        prompt = lane.prompts[0]
        part = min(tokens, prompt.left)
        prompt.left -= part
        prompt.past += part
        tokens -= part
        if not prompt.left:
            done.append(lane.prompts.pop(0))
    return done


class _Rollout:
    """Iteration after iteration, by the turn rule, from the end of the one in flight."""

    def __init__(
        self,
        schedule: Schedule,
        newcomer: Newcomer,
        settled_s: list[tuple[Lane, float]],
        now_s: float,
    ) -> None:
        self._schedule = schedule
        self._newcomer = newcomer
        self._settled_s = settled_s
        self._now_s = now_s
        self._joined = False

    def run(self) -> Verdict:
        self._set_late_aside()
        for _ in range(STEPS_MAX):
            self._join()
            if self._joined and self._settled():
                return Verdict.PASSES
            verdict = self._step()
            if verdict is not None:
                return verdict
        return Verdict.TPOT_EXCEEDED

    def _set_late_aside(self) -> None:
        """Who cannot be in time even if it computed at once is late for other reasons."""
        for lane in self._schedule.lanes:
            if lane.due_s < self._now_s + lane.decode_s + self._schedule.margin_s:
                lane.late_s = min(lane.late_s, lane.due_s)
                lane.due_s = float("inf")

    def _join(self) -> None:
        newcomer = self._newcomer
        if not self._joined and self._now_s >= newcomer.joins_s:
            newcomer.lane.prompts.append(newcomer.prompt)
            self._joined = True

    def _step(self) -> Verdict | None:
        schedule, start_s = self._schedule, self._now_s
        grant = next_turn(schedule.lanes, start_s, prefill_tokens_max=schedule.prefill_tokens_max)
        if grant is None:
            self._now_s = self._newcomer.joins_s
            return None
        slowdown = schedule.slowdown if start_s < schedule.slow_until_s else 1.0
        end_s = self._now_s = start_s + grant.seconds * slowdown
        seen_s = end_s + schedule.margin_s
        done = _advance(grant, start_s, end_s, seen_s)
        if done is None:
            return Verdict.DELAYS_RUNNING
        newcomer = self._newcomer
        for prompt in done:
            if seen_s <= prompt.due_s:
                continue
            if prompt is newcomer.prompt:
                if not newcomer.may_be_late:
                    return Verdict.FIRST_TOKEN_LATE
            elif prompt.due_s >= schedule.now_s:
                return Verdict.DELAYS_RUNNING
        return None

    def _settled(self) -> bool:
        """Whether no token can be late from here on, though batches stay and nobody ever ends.

        All that is left are decodes, computed in the order of their deadlines, none of which has to
        wait for a release. So the deadlines are kept if and only if, for each of them, what is due
        until then can be computed until then. Since one round of decodes takes no longer than the
        TPOT SLOs allow, that is so for all if it is so for the first deadline of each lane.
        """
        if self._now_s < self._schedule.slow_until_s:
            return False
        rows = []
        for lane, decode_s in self._settled_s:
            if lane.prompts or lane.late_s < float("inf"):
                return False
            rows.append((lane.due_s - self._now_s - self._schedule.margin_s, decode_s, lane.tpot_s))
        for deadline_s, _, _ in rows:
            due_s = sum(
                decode_s * ((deadline_s - first_s) / tpot_s + 1.0)
                for first_s, decode_s, tpot_s in rows
                if first_s <= deadline_s
            )
            if due_s > deadline_s:
                return False
        return True
