"""What the controller knows of a node's schedule, as shadow validation takes it.

Read from the live entries of one node for each validation; nothing else of the cell is looked at.
Reports lag behind the node by the link's delay, so that the iteration in flight is inferred: the
node began it when it reported the one before.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mesh.compute.times import Times
from mesh.core.controller.instances.loading_lane import loads_end_s
from mesh.core.controller.instances.prefixes import cached_tokens
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.node_rule import NodeRule
from mesh.domain.profile import Profile
from mesh.domain.reasons import Verdict
from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.request.shadow import (
    LOOKAHEAD_TOKENS,
    Newcomer,
    Schedule,
    in_time_together,
    validate,
)

QUICKER_MOST = 1.1
"""Than expected now, that the iterations of a whole queue may turn out: half of them take less than
their mean. In simulated bursts of 256 calls 1.05 costs 6 of 92 that are met, 1.1 none.
"""

GUESSED_QUICKER_MOST = 1.3
"""The same where the profile is an estimate that a few iterations have corrected: they say how long
a decode takes, and less of prompts and of larger batches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What validation says of a request at a place."""

    verdict: Verdict
    first_token_s: float = inf
    """When its first token would be with its client; infinite where that was not looked at."""

    def in_time_as_predicted(self, due_s: float, now_s: float, overestimate: float) -> bool:
        """Whether its first token would be in time, if iterations took no longer than predicted."""
        return now_s + (self.first_token_s - now_s) / overestimate <= due_s


def forecast_on(
    instance: InstanceEntry,
    request: RequestEntry,
    *,
    now_s: float,
    limits: CellLimits,
    beside: Sequence[RequestEntry] = (),
    late: bool = False,
    moves: bool = False,
) -> Forecast:
    """What becomes of a request on an instance, loaded or loading, with those that wait for its
    load and those beside it that have been promised it already; `late`: its first token may come
    after its deadline. One that `moves` runs well where it is: it does not try out an estimate.
    """
    node, profile, at_s = instance.node, instance.profile, max(now_s, request.carried_s)
    trial, estimated = instance.correction.trial_left, not (profile and profile.measured)
    if instance.state is InstanceState.LOADING:
        assert profile is not None, "loaded for its deployment"
        at_s = loads_end_s(node, now_s)[instance.instance_id]
        if trial and not instance.coming and node.is_idle():
            return _tried_out(node, profile, request, at_s, limits, late=late)
    elif trial and (instance.requests or beside):
        return Forecast(verdict=Verdict.DELAYS_RUNNING)
    elif estimated and not moves and node.is_idle() and (late or request.due_s > now_s):
        return Forecast(verdict=Verdict.PASSES)
    if decode_share_with(instance, now_s, request, *beside) > 1.0:
        return Forecast(verdict=Verdict.TPOT_EXCEEDED)
    schedule, run_queues = _schedule(node, now_s, limits)
    run_queue = run_queues.get(instance.instance_id)
    if run_queue is None:
        run_queue = _run_queue(instance, request.pace_s, now_s)
        if beside:
            schedule.queues.append(run_queue)
    run_queue.quicken(min([run_queue.tpot_s, *(other.pace_s for other in beside)]))
    others = [(run_queue, _prompt_on(instance, other)) for other in beside]
    if at_s > now_s and not moves:
        after = [(at_s, queue, prompt) for queue, prompt in others]
        schedule.after_loads = (*schedule.after_loads, *after)
    else:
        schedule.joining = (*schedule.joining, *others)
    prompt = _prompt_on(instance, request)
    return _forecast(schedule, run_queue, request, at_s, prompt=prompt, late=late)


def forecast_on_start(
    node: NodeEntry,
    profile: Profile,
    ready_s: Callable[[], float],
    request: RequestEntry,
    *,
    share: float,
    now_s: float,
    limits: CellLimits,
    cached: int = 0,
    late: bool = False,
    moves: bool = False,
) -> Forecast:
    """What becomes of a request on a new instance of the node, whose load is over at `ready_s`. A
    full node says TPOT_EXCEEDED nearly always, so that its loads are not looked at before. `share`
    is the node's `decodes_share`; `cached` tokens of the request were left by an earlier instance.
    `late` and `moves` as above.
    """
    if not profile.measured and not moves and node.is_idle():
        return _tried_out(node, profile, request, ready_s(), limits, late=late)
    times = Times(profile, node.rule.overestimate)
    decode_s = times.decode_s(1 + len(request.mates), request.tokens + LOOKAHEAD_TOKENS)
    if share + decode_s / request.pace_s > 1.0:
        return Forecast(verdict=Verdict.TPOT_EXCEEDED)
    at_s = ready_s()
    schedule, _ = _schedule(node, now_s, limits)
    queue = RunQueue(instance_id=InstanceId("new"), times=times, tpot_s=request.pace_s)
    prompt = _prompt(request, request.tokens - cached)
    return _forecast(schedule, queue, request, at_s, prompt=prompt, loads=True, late=late)


def without_time_on(
    instance: InstanceEntry, waiting: Sequence[RequestEntry], *, now_s: float, limits: CellLimits
) -> list[RequestEntry]:
    """Those who wait, in order, whom a loaded instance cannot compute by their deadlines after
    those ahead of them, though all joined it at once and iterations were quicker than predicted;
    and those whose decodes it could not carry beside the others'. Nobody, while an estimate of its
    times is on trial.
    """
    profile = instance.profile
    if profile is None or instance.correction.trial_left or not waiting:
        return []
    quicker = QUICKER_MOST if profile.measured else GUESSED_QUICKER_MOST
    schedule, run_queues = _schedule(instance.node, now_s, limits)
    run_queue = run_queues.get(instance.instance_id)
    if run_queue is None:
        run_queue = _run_queue(instance, waiting[0].pace_s, now_s)
        schedule.queues.append(run_queue)
    for each in schedule.queues:
        correction = instance.node.instances[each.instance_id].correction
        each.times.factor = correction.factor(now_s) / quicker
    # Those that were accepted are served, late or not.
    on = [(request, _prompt_on(instance, request)) for request in waiting]
    prompts = [replace(prompt, due_s=inf) if r.accepted else prompt for r, prompt in on]
    in_time = in_time_together(schedule, run_queue, prompts)
    places = _places_left(instance, waiting[0], now_s)
    without = []
    for request, is_in_time in zip(waiting, in_time, strict=True):
        if is_in_time and places:
            places -= 1
        else:
            without.append(request)
    return without


def _places_left(instance: InstanceEntry, request: RequestEntry, now_s: float) -> int:
    """How many such requests it could decode beside what it has, and be in time with each token."""
    instances = instance.node.instances.values()
    others = sum(_decode_share(i, now_s) for i in instances if i is not instance and _has_work(i))
    batch, tokens = len(instance.requests), instance.tokens
    assert instance.profile is not None, "its times are known"
    care = instance.node.rule.overestimate
    if not instance.profile.measured:
        care /= GUESSED_QUICKER_MOST
    factor = instance.correction.factor(now_s) * care
    times = Times(instance.profile, factor)

    def share(more: int) -> float:
        context = (tokens + more * request.tokens) / (batch + more) + LOOKAHEAD_TOKENS
        return others + times.decode_s(batch + more, context) / request.pace_s

    return bisect_right(range(1, instance.batch_max - batch + 1), 1.0, key=share)


def _forecast(
    schedule: Schedule,
    queue: RunQueue,
    request: RequestEntry,
    ready_s: float,
    *,
    prompt: Prompt,
    loads: bool = False,
    late: bool,
) -> Forecast:
    """`prompt`: what is left of it to compute."""
    queue.quicken(request.pace_s)
    newcomer = Newcomer(
        queue=queue,
        prompt=prompt,
        joins_s=ready_s,
        loads=loads,
        may_be_late=late,
    )
    verdict = validate(schedule, newcomer)
    return Forecast(verdict=verdict, first_token_s=newcomer.first_token_s)


def _tried_out(
    node: NodeEntry,
    profile: Profile,
    request: RequestEntry,
    ready_s: float,
    limits: CellLimits,
    *,
    late: bool,
) -> Forecast:
    """A request tries out an estimated profile, which may be far off, alone on its node, and only
    if its token can still be in time, or may be late.
    """
    if not late and request.due_s <= ready_s:
        return Forecast(verdict=Verdict.FIRST_TOKEN_LATE)
    seconds = alone_s(profile, request, node.rule, limits)
    at_s = ready_s + seconds if seconds < inf else ready_s
    return Forecast(verdict=Verdict.PASSES, first_token_s=at_s)


def alone_s(
    profile: Profile,
    request: RequestEntry,
    rule: NodeRule,
    limits: CellLimits,
    factor: float = 1.0,
    cached: int = 0,
) -> float:
    """How long a request's next token takes on a node that does nothing else, if so many of its
    tokens are cached there; infinite if its further ones could not keep their pace.
    """
    times = Times(profile, factor * rule.overestimate)
    if times.decode_s(1, request.tokens + LOOKAHEAD_TOKENS) > request.pace_s:
        return inf
    left, past, total_s = request.tokens - cached, cached, limits.delivery_s_max
    while left > 0:
        tokens = min(left, rule.chunk_tokens_max)
        total_s += times.prefill_s(tokens, past)
        left, past = left - tokens, past + tokens
    return total_s


def continues_s(
    instance: InstanceEntry, request: RequestEntry, tokens: int, now_s: float, limits: CellLimits
) -> float:
    """Seconds until the next token of a request that is handed over to an instance, where so many
    tokens of it are left to compute: an iteration may just have begun, and each other instance may
    have one that is more urgent.
    """
    node = instance.node
    most = node.rule.chunk_tokens_max
    chunk_s = max(
        (
            _times(other, now_s).prefill_s(min(r.prefill_left, most), r.tokens - r.prefill_left)
            for other in node.instances.values()
            for r in other.requests.values()
            if r.prefill_left
        ),
        default=0.0,
    )
    own_s = _times(instance, now_s).prefill_s(tokens, request.tokens - tokens)
    return limits.delivery_s_max + chunk_s + round_s(node, now_s) + own_s


def in_time_alone(
    instance: InstanceEntry, request: RequestEntry, now_s: float, limits: CellLimits
) -> bool:
    """Whether an instance could keep the request's SLO if its node did nothing else."""
    if instance.profile is None:
        return False
    factor, rule = instance.correction.factor(now_s), instance.node.rule
    cached = cached_tokens(instance, request)
    seconds = alone_s(instance.profile, request, rule, limits, factor, cached)
    return now_s + seconds <= request.due_s


def decodes_share(node: NodeEntry, now_s: float) -> float:
    """What validation looks at first: one decode of each instance over its TPOT SLO, summed, of
    those to come, too. Were it above 1 with a request, that would be TPOT_EXCEEDED. On a full node
    that is the answer nearly always, so that it must not cost a copy of the schedule.
    """
    return sum(_decode_share(i, now_s) for i in node.instances.values() if _has_work(i))


def batch_decode_s(instance: InstanceEntry, now_s: float) -> float:
    """The time of a decode of all requests that the instance has or will have; 0 where there is
    none.
    """
    return _decode_s(instance, now_s) if _has_work(instance) else 0.0


def time_left_s(node: NodeEntry, now_s: float, due_s: float, seconds: float) -> float:
    """The least time that a deadline of the node leaves over, were so much more work due then:
    prompts by their deadlines, beside decodes all along. What is late already does not count.
    """
    dues = [(due_s, seconds)]
    for instance in node.instances.values():
        for request in (instance.requests or instance.coming).values():
            left = request.prefill_left if instance.requests else request.tokens
            if left and request.due_s > now_s:
                prefill_s = _times(instance, now_s).prefill_s(left, request.tokens - left)
                dues.append((request.due_s, prefill_s))
    share, work_s, least_s = decodes_share(node, now_s), 0.0, inf
    for at_s, more_s in sorted(dues):
        work_s += more_s
        least_s = min(least_s, (at_s - now_s) * (1.0 - share) - work_s)
    return least_s


def link_left_s(
    node: NodeEntry,
    into: InstanceEntry | None,
    now_s: float,
    due_s: float,
    copy_s: Callable[[InstanceEntry | None], float],
) -> float:
    """The least time that a deadline leaves over on the link of a node that swaps, were a request
    due then on an instance, or on one that starts: weights that are out come by the deadlines of
    their instances, one after the other. Deadlines that it does not delay, or that would not be
    kept without it, do not count.
    """
    own_s = copy_s(into)
    next_s = inf if into is None else _next_due_s(into)
    due_s = min(due_s, next_s) if next_s > now_s else due_s
    others = (i for i in node.instances.values() if i is not into and _has_work(i))
    dues = sorted((_next_due_s(other), copy_s(other)) for other in others)
    work_s = sum(more_s for at_s, more_s in dues if at_s <= due_s)
    least_s = due_s - now_s - work_s - own_s
    for at_s, more_s in dues:
        if at_s > due_s and more_s:
            work_s += more_s
            if now_s + work_s <= at_s:
                least_s = min(least_s, at_s - now_s - work_s - own_s)
    return least_s


def _next_due_s(instance: InstanceEntry) -> float:
    work = instance.requests or instance.coming
    return min((request.due_s for request in work.values()), default=inf)


def round_s(node: NodeEntry, now_s: float) -> float:
    """Seconds of one decode of each instance that has requests, or will have some."""
    return sum(_decode_s(i, now_s) for i in node.instances.values() if _has_work(i))


def decode_share_with(into: InstanceEntry, now_s: float, *more: RequestEntry) -> float:
    """The `decodes_share` of its node, were these requests on the instance, too."""
    instances = into.node.instances.values()
    others = sum(_decode_share(i, now_s) for i in instances if i is not into and _has_work(i))
    return others + _decode_share(into, now_s, more)


def _decode_share(
    instance: InstanceEntry, now_s: float, more: Sequence[RequestEntry] = ()
) -> float:
    paces_s = [instance.pace_s] if _has_work(instance) else []
    return _decode_s(instance, now_s, more) / min((*paces_s, *(r.pace_s for r in more)))


def _decode_s(instance: InstanceEntry, now_s: float, more: Sequence[RequestEntry] = ()) -> float:
    """The time of a decode of all requests that the instance has or will have, and of `more`."""
    batch, tokens = len(instance.requests), instance.tokens
    if not batch:
        coming = instance.coming
        batch, tokens = len(coming), sum(request.tokens for request in coming.values())
    batch, tokens = batch + len(more), tokens + sum(request.tokens for request in more)
    return _times(instance, now_s).decode_s(batch, tokens / batch + LOOKAHEAD_TOKENS)


def _has_work(instance: InstanceEntry) -> bool:
    """Whether requests run on it, or wait for its load: never both."""
    return bool(instance.requests or instance.coming)


def _times(instance: InstanceEntry, now_s: float) -> Times:
    assert instance.profile is not None
    factor = instance.correction.planned(now_s) * instance.node.rule.overestimate
    return Times(instance.profile, factor)


def _schedule(
    node: NodeEntry, now_s: float, limits: CellLimits
) -> tuple[Schedule, dict[InstanceId, RunQueue]]:
    run_queues: dict[InstanceId, RunQueue] = {}
    joining: list[tuple[RunQueue, Prompt]] = []
    after_loads: list[tuple[float, RunQueue, Prompt]] = []
    started_s = node.iteration_started_s
    ends_s = loads_end_s(node, now_s)
    for instance in node.instances.values():
        work = instance.requests or instance.coming
        if not work:
            continue
        run_queue = _run_queue(instance, instance.pace_s, now_s)
        run_queues[instance.instance_id] = run_queue
        if instance.requests:
            _fill(run_queue, instance, started_s, joining, after_loads, now_s)
        else:
            ready_s = ends_s[instance.instance_id]
            after_loads += [(ready_s, run_queue, _prompt_on(instance, r)) for r in work.values()]
    schedule = Schedule(
        queues=list(run_queues.values()),
        now_s=now_s,
        rule=node.turns,
        prefill_tokens_max=node.rule.chunk_tokens_max,
        turn_s_max=node.rule.turn_s_max,
        started_s=started_s,
        joining=joining,
        after_loads=after_loads,
        slowdown=node.load_slowdown,
        slow_until_s=max(ends_s.values(), default=0.0),
        margin_s=limits.delivery_s_max,
    )
    return schedule, run_queues


def _run_queue(instance: InstanceEntry, pace_s: float, now_s: float) -> RunQueue:
    """An empty run queue. How many turns have passed it over is known to its node alone."""
    return RunQueue(instance_id=instance.instance_id, times=_times(instance, now_s), tpot_s=pace_s)


def _fill(
    run_queue: RunQueue,
    instance: InstanceEntry,
    started_s: float | None,
    joining: list[tuple[RunQueue, Prompt]],
    later: list[tuple[float, RunQueue, Prompt]],
    now_s: float,
) -> None:
    """Put the instance's requests into its run queue; those that came after the iteration began
    join, and those whose KV blocks are on their way do so `later`. `validate` predicts its decodes.
    """
    dues_s, running, mixed = run_queue.dues_s, run_queue.running, False
    context_tokens = 0
    for request in instance.requests.values():
        left = request.prefill_left
        if not left:
            context_tokens += request.tokens
            dues_s.append(request.due_s)
            running.append(request.request_id)
            if request.pace_s != run_queue.tpot_s:
                mixed = True
            continue
        prompt = _prompt(request, left)
        if request.carried_s > now_s:
            later.append((request.carried_s, run_queue, prompt))
        elif started_s is not None and request.submitted_s > started_s:
            joining.append((run_queue, prompt))
        else:
            run_queue.prompts.append(prompt)
    run_queue.batch, run_queue.context_tokens = len(dues_s), context_tokens
    if mixed:
        on = [instance.requests[request_id] for request_id in running]
        run_queue.divide([(r.request_id, r.due_s, r.tokens, r.pace_s) for r in on], now_s)
    else:
        run_queue.sort_dues(now_s)


def _prompt_on(instance: InstanceEntry, request: RequestEntry) -> Prompt:
    """The prompt of a request that is to begin on the instance, where some of it may be computed
    already.
    """
    return _prompt(request, request.tokens - cached_tokens(instance, request))


def _prompt(request: RequestEntry, left: int | None = None) -> Prompt:
    """The prompt of a request that has `left` tokens to compute; all of them, where it is
    to begin.
    """
    left = request.tokens if left is None else left
    slack_s = inf if request.output_tokens else request.slack_s
    return Prompt(
        request_id=request.request_id,
        left=left,
        past=request.tokens - left,
        due_s=request.due_s,
        slack_s=slack_s,
        tpot_s=request.pace_s,
    )
