"""Shadow validation: would this request, here, keep every SLO? (LLM-Mesh §5.3)

The request is put into a copy of one node's schedule, which is rolled forward by the turn rule that
the node itself follows, until nothing can go wrong any more. Where weights are swapped and not all
fit, that is until those of each instance with work could have come once more after the last prompt
(`mesh.request.pool`): nobody is late until then, and what is due later is bounded by the decodes'
share of the time alone. Before: the policy's order of candidates. After: the request is submitted,
or the next candidate is tried.
"""

from collections.abc import Sequence
from math import ceil, inf
from operator import itemgetter

from mesh.domain.ids import InstanceId
from mesh.domain.reasons import Verdict
from mesh.domain.steps import Prefill, PrefillBudget
from mesh.domain.values import dataclass
from mesh.policy.rules.decode_capacity import Job, reached_s, spare_s
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.run_queues import PaceClass, Prompt, RunQueue
from mesh.policy.rules.turns import Grant, TurnRule, next_turn, note_turn
from mesh.request.pool import Pool

LOOKAHEAD_TOKENS = 64
"""Contexts count as if they had grown by so much already: every token makes them longer."""
STEPS_MAX = 512
"""Iterations that a schedule is rolled forward. What is not settled by then is refused as what
might delay others: nothing says that there is no time for it.
"""
EQUAL_S = 1e-9
"""Times that differ by less differ by rounding."""
SKIPPED_ROUNDS_MIN = 16
"""Rounds of decodes that are worth skipping."""


@dataclass(slots=True, kw_only=True, eq=False)
class Schedule:
    """A node's work, copied for one validation, which changes it. The run queues' times hold the
    correction and the overestimate of the node rule.
    """

    queues: list[RunQueue]
    now_s: float
    prefill_tokens_max: int
    rule: TurnRule = HEADROOM
    turn_s_max: float = 0.0
    """As the node's rule has it."""
    started_s: float | None = None
    """When the iteration in flight began; None when there is none."""
    best_effort_s: float = 0.0
    """The longest iteration of best effort that may just have begun; nobody whom it makes late is
    excused.
    """
    joining: Sequence[tuple[RunQueue, Prompt]] = ()
    """Requests submitted since then: they take part from the next iteration on."""
    after_loads: Sequence[tuple[float, RunQueue, Prompt]] = ()
    """Requests that wait for loads, and when those are over, or since when for room for their KV
    blocks: nobody joins while weights have to make room.
    """
    grows: Sequence[tuple[float, float]] = ()
    """KV caches that grow: from when on, and the seconds in which nothing computes. They wait while
    weights have to make room.
    """
    slowdown: float = 1.0
    """How much longer iterations take that begin before `slow_until_s`, because a load computes
    beside them.
    """
    slow_until_s: float = 0.0
    margin_s: float = 0.0
    """From the end of an iteration until its tokens are with their clients."""
    pool: Pool | None = None
    """Which weights are on the device, where they are swapped: `None` where all are."""

    def computing(self) -> list[RunQueue]:
        """Those whose weights are on the device."""
        pool = self.pool
        return self.queues if pool is None else [q for q in self.queues if pool.computes(q)]

    def decode_margin_s(self, tpot_s: float) -> float:
        """The margin of a decode: as on its node, at most a quarter of its TPOT. Its client has had
        the token before through the same links.
        """
        return min(self.margin_s, tpot_s / 4)


@dataclass(slots=True, kw_only=True, eq=False)
class Newcomer:
    """The request to validate, on its way to `queue`, which may be a new one."""

    queue: RunQueue
    prompt: Prompt
    joins_s: float
    """When it can start: now, or once its instance is loaded."""
    loads: bool = False
    """Its instance loads until then, and slows the other iterations down."""
    may_be_late: bool = False
    """Its first token may come when it can: whoever waits for it has been told, or is to be."""
    grow_s: float = 0.0
    """For how long nothing computes when it joins, because a KV cache grows for it."""
    first_token_s: float = inf
    """When its first token is with its client; set by `validate` where it passes."""


def validate(schedule: Schedule, newcomer: Newcomer) -> Verdict:
    """Whether the newcomer can be taken, or which of the three cases forbids it."""
    queues = schedule.queues
    if newcomer.queue not in queues:
        queues.append(newcomer.queue)
    settled_s = _final_decodes(schedule, newcomer)
    if sum(decode_s / queue.tpot_s for queue, decode_s in settled_s) > 1.0:
        return Verdict.TPOT_EXCEEDED
    for queue in queues:
        queue.predict(LOOKAHEAD_TOKENS)
    now_s = _finish_in_flight(schedule)
    for queue, prompt in schedule.joining:
        queue.prompts.append(prompt)
    return _Rollout(schedule, newcomer, settled_s, now_s).run()


def in_time_together(schedule: Schedule, queue: RunQueue, waiting: Sequence[Prompt]) -> list[bool]:
    """Which of the prompts that wait for `queue`, in order, would be computed by their deadlines,
    were all of them submitted now. Those that cannot be any more are left out as soon as that is
    so; whom the others make late is not looked at. Those that are not reached in STEPS_MAX are.
    """
    if queue not in schedule.queues:
        schedule.queues.append(queue)
    for each in schedule.queues:
        each.predict(LOOKAHEAD_TOKENS)
    now_s = _finish_in_flight(schedule)
    now_s += _slowed_s(schedule, now_s, schedule.best_effort_s)
    for other, prompt in schedule.joining:
        other.prompts.append(prompt)
    queue.prompts += waiting
    places = {id(prompt): place for place, prompt in enumerate(waiting)}
    in_time = [False] * len(waiting)
    open_left = len(waiting)
    for _ in range(STEPS_MAX):
        least_s = now_s + schedule.margin_s
        kept = [p for p in queue.prompts if p.due_s > least_s or id(p) not in places]
        open_left -= len(queue.prompts) - len(kept)
        queue.prompts = kept
        if schedule.pool is not None:
            schedule.pool.decide(schedule.queues, now_s)
        grant = _next_turn(schedule, now_s) if open_left else None
        if grant is None:
            if not open_left or schedule.pool is None or schedule.pool.moving is None:
                return in_time
            now_s = schedule.pool.roll_on(schedule.queues, inf)
            continue
        now_s += _slowed_s(schedule, now_s, grant.seconds)
        decoding = grant.queue.decoding(grant.decode)
        for prompt in _advance(schedule, grant, now_s, decoding):
            if id(prompt) in places:
                in_time[places[id(prompt)]] = now_s + schedule.margin_s <= prompt.due_s
                open_left -= 1
    left = {id(prompt) for prompt in queue.prompts}
    return [known or id(prompt) in left for prompt, known in zip(waiting, in_time, strict=True)]


def _final_decodes(schedule: Schedule, newcomer: Newcomer) -> list[tuple[RunQueue, float]]:
    """Seconds of a decode of each run queue once all in it, the newcomer too, are past their
    prompts.
    """
    coming: dict[int, list[Prompt]] = {id(newcomer.queue): [newcomer.prompt]}
    for queue, prompt in schedule.joining:
        coming.setdefault(id(queue), []).append(prompt)
    for _, queue, prompt in schedule.after_loads:
        coming.setdefault(id(queue), []).append(prompt)
    result = []
    for queue in schedule.queues:
        batch, tokens = queue.batch, queue.context_tokens
        for first in (*queue.prompts, *coming.get(id(queue), ())):
            decoding = [prompt for prompt in (first, *first.mates) if prompt.decodes]
            batch += len(decoding)
            tokens += sum(prompt.left + prompt.past for prompt in decoding)
        if batch:
            result.append((queue, queue.times.decode_s(batch, tokens / batch + LOOKAHEAD_TOKENS)))
    return result


def _finish_in_flight(schedule: Schedule) -> float:
    """Complete the iteration in flight; when it ends. It is not on account of the newcomer if that
    makes somebody late. An iteration of best effort may be in flight in its place where the rule
    goes by deadlines and nobody has a prompt.
    """
    start_s = schedule.started_s
    if start_s is None:
        return schedule.now_s
    for queue in schedule.queues:
        if queue.late_s < inf:
            # What is late now may not have been when the iteration began.
            queue.sort_out(start_s)
    grant = _next_turn(schedule, start_s)
    if grant is None:
        return schedule.now_s
    by_turns = schedule.rule.period is not None
    if by_turns or any(queue.prompts for queue in schedule.computing()):
        schedule.best_effort_s = 0.0
    end_s = max(schedule.now_s, start_s + _slowed_s(schedule, start_s, grant.seconds))
    _advance(schedule, grant, end_s, grant.queue.decoding(grant.decode))
    return end_s


def _next_turn(schedule: Schedule, start_s: float) -> Grant | None:
    return next_turn(
        schedule.rule,
        schedule.computing(),
        start_s,
        prefill_tokens_max=schedule.prefill_tokens_max,
        turn_s_max=schedule.turn_s_max,
    )


def _slowed_s(schedule: Schedule, start_s: float, seconds: float) -> float:
    return seconds * schedule.slowdown if start_s < schedule.slow_until_s else seconds


def _advance(
    schedule: Schedule, grant: Grant, end_s: float, decoding: Sequence[PaceClass]
) -> list[Prompt]:
    """Carry a turn out, in which these decode, and the swaps that end beside it: the prompts that
    it completes.
    """
    queue = grant.queue
    if schedule.pool is not None:
        schedule.pool.roll(schedule.queues, end_s, stepping=queue)
    if queue.batch:
        for part in decoding:
            for _ in range(grant.iterations):
                part.decoded(end_s)
            part.owed_s = part.due_s
        if queue.classes:
            queue.gather()
    done = _compute_prompts(queue, grant.prefill) if grant.prefill else []
    for prompt in done:
        if prompt.decodes:
            queue.join(prompt, end_s)
    if done:
        queue.predict(LOOKAHEAD_TOKENS)
        queue.owed_s = queue.due_s
    note_turn(grant)
    return done


def _compute_prompts(queue: RunQueue, prefill: Prefill) -> list[Prompt]:
    """Compute prompt tokens, in the order of submission; the prompts that this ends."""
    done, budget = [], PrefillBudget(prefill)
    for prompt in tuple(queue.prompts):
        if budget.left <= 0:
            break
        part = min(budget.tokens_of(prompt.request_id), prompt.left)
        prompt.left -= part
        prompt.past += part
        budget.spend(prompt.request_id, part)
        if not prompt.left:
            place = queue.prompts.index(prompt)
            queue.prompts[place : place + 1] = prompt.mates
            done.append(prompt)
    return done


class _Rollout:
    """Iteration after iteration, by the turn rule, from the end of the one in flight."""

    def __init__(
        self,
        schedule: Schedule,
        newcomer: Newcomer,
        settled_s: list[tuple[RunQueue, float]],
        now_s: float,
    ) -> None:
        self._schedule = schedule
        self._pool = schedule.pool
        self._newcomer = newcomer
        self._settled_s = settled_s
        self._begun_s = self._now_s = now_s
        coming = [*schedule.after_loads, (newcomer.joins_s, newcomer.queue, newcomer.prompt)]
        self._coming = sorted(coming, key=itemgetter(0))
        self._grows = sorted(schedule.grows)
        self._excused: list[Prompt] = []
        """Prompts that are late for other reasons than the newcomer."""
        self._calm_s = now_s
        """When the last prompt had been computed, and nobody was to come."""
        self._slacks_s: dict[int, list[float]] = {}
        """How much earlier than due the tokens of each class came since the last prompt."""

    def run(self) -> Verdict:
        self._grow()
        self._begun_s = self._calm_s = self._now_s
        self._excuse_late()
        self._now_s += _slowed_s(self._schedule, self._now_s, self._schedule.best_effort_s)
        if self._newcomer.grow_s:
            self._grows.append((self._newcomer.joins_s, self._newcomer.grow_s))
            self._grows.sort()
        if self._newcomer.loads:
            # From here on: whom this makes late is late on account of the newcomer.
            joins_s = self._newcomer.joins_s
            self._schedule.slow_until_s = max(self._schedule.slow_until_s, joins_s)
        for _ in range(STEPS_MAX):
            if self._grows:
                self._grow()
            if self._coming or self._now_s < self._schedule.slow_until_s:
                self._skip()
                self._join()
            if not self._coming and not self._grows and self._settled():
                return Verdict.PASSES
            verdict = self._step()
            if verdict is not None:
                return verdict
        return Verdict.DELAYS_RUNNING

    def _excuse_late(self) -> None:
        """Who cannot be in time even if it computed at once is late for other reasons."""
        there_s: dict[InstanceId, float] = {}
        if self._pool is not None:
            there_s = self._pool.arrivals_s(self._schedule.queues, self._now_s)
        for queue in self._schedule.queues:
            start_s = there_s.get(queue.instance_id, self._now_s)
            end_s = start_s + _slowed_s(self._schedule, start_s, queue.decode_s)
            for part in queue.parts:
                least_s = end_s + self._schedule.decode_margin_s(part.tpot_s)
                part.owed_s = part.due_s
                if part.owed_s < least_s:
                    kept = (due_s for due_s in part.dues_s if due_s >= least_s)
                    part.owed_s = min(kept, default=inf)
            for prompt in queue.prompts:
                self._excuse(queue, prompt, max(start_s, self._begun_s))

    def _seen_s(self, start_s: float, seconds: float) -> float:
        """When the first tokens of an iteration are with their clients."""
        return start_s + _slowed_s(self._schedule, start_s, seconds) + self._schedule.margin_s

    def _grow(self) -> None:
        """Have the KV caches grow whose time has come, one after the other."""
        schedule, pool = self._schedule, self._pool
        while self._grows and self._grows[0][0] <= self._now_s:
            if pool is not None and pool.free_bytes < 0:
                return
            self._now_s += self._grows.pop(0)[1]
            if pool is not None:
                pool.roll(schedule.queues, self._now_s)

    def _join(self) -> None:
        while self._coming and self._now_s >= self._coming[0][0]:
            if self._pool is not None and self._pool.free_bytes < 0:
                return
            joins_s, queue, prompt = self._coming.pop(0)
            queue.prompts.append(prompt)
            # An iteration that it has come in the middle of may be the newcomer's.
            self._excuse(queue, prompt, max(joins_s, self._begun_s))

    def _excuse(self, queue: RunQueue, prompt: Prompt, from_s: float) -> None:
        """A prompt that would be late even if it were computed at once is so for other reasons."""
        at_once_s = queue.at_once_s(prompt, self._schedule.prefill_tokens_max)
        if prompt.due_s < self._seen_s(from_s, at_once_s):
            self._excused.append(prompt)
        for mate in prompt.mates:
            mate_s = at_once_s + queue.at_once_s(mate, self._schedule.prefill_tokens_max)
            if mate.due_s < self._seen_s(from_s, mate_s):
                self._excused.append(mate)

    def _skip(self) -> None:
        """Leave out the decodes before the newcomer joins, or a load ends, if they are many and in
        time. Where they get to is reckoned a round short of it at most. If that is behind time, as
        more becomes due beside a load than can be computed, the next step shows it.
        """
        schedule, now_s = self._schedule, self._now_s
        if schedule.rule.period is not None or schedule.pool is not None:
            return
        until_s = self._coming[0][0] if self._coming else schedule.slow_until_s
        slowdown = 1.0
        if now_s < schedule.slow_until_s:
            until_s, slowdown = min(until_s, schedule.slow_until_s), schedule.slowdown
        if until_s <= now_s:
            return
        queues = [queue for queue in schedule.queues if queue.batch or queue.prompts]
        jobs = [(queue.due_s, queue.decode_s * slowdown, queue.tpot_s) for queue in queues]
        decodes_s = [decode_s for _, decode_s, _ in jobs]
        round_s = sum(decodes_s)
        if not jobs or until_s - now_s <= round_s * SKIPPED_ROUNDS_MIN:
            return
        if any(queue.prompts or queue.late_s < inf for queue in queues):
            return
        if not self._in_time(jobs):
            return
        reached = reached_s(jobs, until_s - now_s)
        for queue in queues:
            for part in queue.parts:
                decodes = max(ceil((reached - part.due_s) / part.tpot_s), 0)
                part.go_on_from(part.due_s + decodes * part.tpot_s)
            if queue.classes:
                queue.gather()
        # The turn that is under way by then has to end first.
        self._now_s = until_s + max(schedule.turn_s_max, *decodes_s)

    def _step(self) -> Verdict | None:
        schedule, pool, start_s = self._schedule, self._pool, self._now_s
        if pool is not None:
            pool.decide(schedule.queues, start_s)
        grant = _next_turn(schedule, start_s)
        if grant is None:
            ats_s = [*(at_s for at_s, _, _ in self._coming), *(at_s for at_s, _ in self._grows)]
            comes_s = min([at_s for at_s in ats_s if at_s > start_s], default=inf)
            if pool is not None:
                comes_s = pool.roll_on(schedule.queues, comes_s)
            if comes_s == inf:
                return Verdict.TPOT_EXCEEDED
            self._now_s = max(start_s, comes_s)
            return None
        queue = grant.queue
        end_s = self._now_s = start_s + _slowed_s(schedule, start_s, grant.seconds)
        seen_s = end_s + schedule.margin_s
        decoding, decodes_late = queue.decoding(grant.decode), False
        for part in decoding:
            if end_s + schedule.decode_margin_s(part.tpot_s) > part.owed_s:
                decodes_late = True
        done = _advance(schedule, grant, end_s, decoding)
        verdict = self._judge(done, seen_s) if done else None
        if schedule.rule.period is not None:
            self._note_slack(decoding, end_s)
        return Verdict.DELAYS_RUNNING if decodes_late else verdict

    def _note_slack(self, decoding: Sequence[PaceClass], end_s: float) -> None:
        if any(queue.prompts for queue in self._schedule.queues):
            self._slacks_s.clear()
            return
        for part in decoding:
            self._slacks_s.setdefault(id(part), []).append(part.due_s - end_s)

    def _repeats(self, period: int) -> bool:
        """Whether no class was closer to its deadline in its last period than in the one before:
        all that is left are decodes, which go on as they did.
        """
        for queue in self._schedule.queues:
            if queue.prompts or queue.late_s < inf:
                return False
            for part in queue.parts if queue.batch else ():
                slacks_s = self._slacks_s.get(id(part), ())
                before, last = slacks_s[-2 * period : -period], slacks_s[-period:]
                if not before or len(before) < period or min(last) < min(before) - EQUAL_S:
                    return False
        return True

    def _judge(self, done: list[Prompt], seen_s: float) -> Verdict | None:
        """The verdict about the first of these prompts, seen at `seen_s`, that is late without an
        excuse.
        """
        newcomer = self._newcomer
        if any(prompt is newcomer.prompt for prompt in done):
            newcomer.first_token_s = seen_s
        for prompt in done:
            if seen_s <= prompt.due_s:
                continue
            if prompt in (newcomer.prompt, *newcomer.prompt.mates):
                if not newcomer.may_be_late:
                    return Verdict.FIRST_TOKEN_LATE
            elif prompt not in self._excused:
                return Verdict.DELAYS_RUNNING
        return None

    def _settled(self) -> bool:
        """Whether no token can be late from here on, though batches stay and nobody ever ends.

        All that is left are decodes, computed in the order of their deadlines, none of which has to
        wait for a release. So the deadlines are kept if and only if, for each of them, what is due
        until then can be computed until then. Since one round of decodes takes no longer than the
        TPOT SLOs allow, that is so for all if it is so for the first deadline of each run queue.
        """
        if self._now_s < self._schedule.slow_until_s:
            return False
        if self._schedule.rule.period is not None:
            return self._repeats(self._schedule.rule.period)
        if self._pool is not None and not all(map(self._pool.computes, self._working())):
            return self._has_gone_round(self._pool)
        for queue in self._schedule.queues:  # A generator would take a tenth of a validation.
            if queue.prompts or queue.late_s < inf:
                return False
        return self._in_time([(of.due_s, decode_s, of.tpot_s) for of, decode_s in self._settled_s])

    def _working(self) -> list[RunQueue]:
        return [queue for queue in self._schedule.queues if queue.batch or queue.prompts]

    def _has_gone_round(self, pool: Pool) -> bool:
        """Whether the weights of all could have come once since the last prompt was computed, or
        all tokens until they have, and each has had a turn, are there already.
        """
        queues = self._working()
        if any(queue.prompts or queue.late_s < inf for queue in queues):
            self._calm_s = self._now_s
            return False
        cycle_s = pool.cycle_s(queues)
        ahead_s = min(queue.due_s for queue in queues) - self._now_s
        round_s = sum(max(queue.decode_s, self._schedule.turn_s_max) for queue in queues)
        return self._now_s - self._calm_s >= cycle_s or ahead_s >= cycle_s + round_s

    def _in_time(self, jobs: list[Job]) -> bool:
        """Whether decodes that go on for ever are with their clients when they are due."""
        margin_s = self._schedule.decode_margin_s
        seen = [(due_s - margin_s(tpot_s), decode_s, tpot_s) for due_s, decode_s, tpot_s in jobs]
        return spare_s(seen, self._now_s) >= -EQUAL_S
