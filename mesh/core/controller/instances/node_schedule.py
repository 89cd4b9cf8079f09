"""What the controller knows of a node's schedule: its loads, and its iterations as shadow
validation takes them.

In which order loads run the node's reservation station (`mesh.memory.station`) decides, and it is
asked here; how long each of them takes is known here. All is read from the live entries of one node
for each validation; nothing else of the cell is looked at. Reports lag behind the node by the
link's delay, so that the iteration in flight is inferred: the node began it when it reported the
one before.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import cast

from mesh.compute.times import Times
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import Deployment
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.node_rule import NodeRule
from mesh.domain.profile import Profile
from mesh.domain.reasons import Verdict
from mesh.domain.steps import part_bytes
from mesh.domain.values import dataclass, replace
from mesh.memory.station import NEWCOMER, ReservationKind
from mesh.policy.rules.run_queues import Prompt, RunQueue
from mesh.policy.rules.swapping import BEHIND_S, Swap, SwapRule
from mesh.policy.rules.turns import best_effort_tokens
from mesh.request.pool import Held, Pool
from mesh.request.shadow import LOOKAHEAD_TOKENS, Newcomer, Schedule, in_time_together, validate

OVERDUE_SHARE = 0.25
"""A load that should have ended is expected to take this share of its expected time yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """What a load that has not been issued will be, from where its weights would come now."""

    kind: ReservationKind
    load_s: float
    """The seconds that it is planned with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a load among the others of its node."""

    load: PlannedLoad
    ready_s: float
    """When the load is over."""
    waits: bool = False
    """Whether others of its kind are under way, or wait, before it or behind it."""


def plan_load(
    ctx: EventContext,
    deployment: Deployment,
    node: NodeEntry,
    without: Collection[InstanceId] = (),
) -> PlannedLoad:
    """Plan a load on the node, `without` the instances that go for it."""
    weights_bytes = node.footprint_of(deployment).weights_bytes
    (tier, kind), beside = node.source_of(deployment, without), node.computes_beside_load()
    moved_bytes = node.load_bytes(weights_bytes, tier)
    seconds = ctx.cell.expectations.load_s(node.hello, moved_bytes, tier, beside=beside)
    return PlannedLoad(kind=kind, load_s=seconds)


def loads_end_s(
    node: NodeEntry, now_s: float, newcomer: tuple[PlannedLoad, float] | None = None
) -> dict[InstanceId, float]:
    """When each load of the node is expected to be over, in the order in which its station starts
    those of a kind. The `newcomer` is one more load, and when it is needed.
    """
    instances, station = node.instances, node.station

    def ends_s(name: InstanceId, start_s: float) -> float:
        if name == NEWCOMER:
            assert newcomer is not None
            return start_s + newcomer[0].load_s
        instance = instances[name]
        if not station.running(name):
            return start_s + instance.load_s
        expected_s = instance.load_started_s + instance.load_s
        return expected_s if expected_s > now_s else now_s + instance.load_s * OVERDUE_SHARE

    def cancelled(name: InstanceId) -> bool:
        return name != NEWCOMER and instances[name].state is InstanceState.UNLOADING

    added = None if newcomer is None else (newcomer[0].kind, newcomer[1])
    return station.forecast(now_s, ends_s, cancelled=cancelled, newcomer=added)


def lane_ends_s(node: NodeEntry, now_s: float, kind: ReservationKind) -> float:
    """When all loads of a kind are over."""
    return _last_s(node, loads_end_s(node, now_s), kind, now_s)


def _last_s(
    node: NodeEntry, ends_s: Mapping[InstanceId, float], kind: ReservationKind, now_s: float
) -> float:
    of_kind = (end_s for name, end_s in ends_s.items() if node.station.load_kind(name) is kind)
    return max(of_kind, default=now_s)


def slot_for(node: NodeEntry, load: PlannedLoad, needed_s: float, now_s: float) -> Slot:
    """When one more load would be over that is needed by `needed_s`: where the node's station would
    start it, or behind all others of its kind if one of them would be late because of it.
    """
    before_s = loads_end_s(node, now_s)
    if not before_s:
        return Slot(load=load, ready_s=now_s + load.load_s)
    beside_s = loads_end_s(node, now_s, newcomer=(load, needed_s))
    last_s = _last_s(node, before_s, load.kind, now_s)
    delays = any(
        end_s <= node.instances[name].needed_s < beside_s[name] for name, end_s in before_s.items()
    )
    if delays:
        return Slot(load=load, ready_s=last_s + load.load_s, waits=last_s > now_s)
    return Slot(load=load, ready_s=beside_s[NEWCOMER], waits=last_s > now_s)


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
    more_kv_bytes: int = 0,
    grow_s: float = 0.0,
) -> Forecast:
    """What becomes of a request on an instance, loaded or loading, with those that wait for its
    load and those beside it that have been promised it already; `late`: its first token may come
    after its deadline. One that `moves` runs well where it is: it does not try out an estimate.
    `more_kv_bytes`: what KV caches will take more, which the pool of weights lacks then; `grow_s`:
    for how long nothing computes because of that.
    """
    if request.slo.best_effort and instance.is_loaded:
        return Forecast(verdict=Verdict.PASSES)
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
    exceeded = instance.refusals.exceeded
    if exceeded and decode_share_with(instance, now_s, request, *beside) > 1.0:
        return Forecast(verdict=Verdict.TPOT_EXCEEDED)
    schedule, run_queues = _schedule(node, now_s, limits)
    run_queue = run_queues.get(instance.instance_id)
    if run_queue is None:
        run_queue = _run_queue(instance, request.pace_s, now_s)
        if beside:
            schedule.queues.append(run_queue)
    run_queue.quicken(min([run_queue.tpot_s, *(other.pace_s for other in beside)]))
    prompt = _prompt_on(instance, request)
    mates = [other for other in beside if other.leader is request]
    prompt.mates = [_prompt_on(instance, mate) for mate in mates]
    others = [(run_queue, _prompt_on(instance, o)) for o in beside if o not in mates]
    if at_s > now_s and not moves:
        after = [(at_s, queue, prompt) for queue, prompt in others]
        schedule.after_loads = (*schedule.after_loads, *after)
    else:
        schedule.joining = (*schedule.joining, *others)
    if schedule.pool is not None:
        schedule.pool.free_bytes -= more_kv_bytes
    return _forecast(schedule, run_queue, request, at_s, prompt=prompt, late=late, grow_s=grow_s)


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
    block_tokens: int = 1,
    late: bool = False,
    moves: bool = False,
    weights_bytes: int = 0,
    more_kv_bytes: int = 0,
) -> Forecast:
    """What becomes of a request on a new instance of the node, whose load is over at `ready_s`. A
    full node says TPOT_EXCEEDED nearly always, so that its loads are not looked at before. `share`
    is the node's `decodes_share`; `cached` tokens of the request were left by an earlier instance,
    whose blocks have `block_tokens`.
    `late`, `moves` and `more_kv_bytes` as above; `weights_bytes`: those of the instance.
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
    if schedule.pool is not None:
        schedule.pool.free_bytes -= more_kv_bytes
        coming = Held(weights_bytes=weights_bytes, copy_s=node.copy_s(weights_bytes))
        schedule.pool.hold(queue.instance_id, coming)
    prompt = _prompt(request, request.tokens - cached)
    for mate in request.mates:
        prompt.mates.append(_prompt(mate, mate.tokens - mate.led_tokens(block_tokens)))
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
    work = _work(instance)
    batch, tokens = len(work), sum(of.tokens for of in work)
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
    grow_s: float = 0.0,
) -> Forecast:
    """`prompt`: what is left of it to compute."""
    queue.quicken(request.pace_s)
    newcomer = Newcomer(
        queue=queue,
        prompt=prompt,
        joins_s=ready_s,
        loads=loads,
        may_be_late=late,
        grow_s=grow_s,
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
            times_of(other, now_s).prefill_s(min(r.prefill_left, most), r.tokens - r.prefill_left)
            for other in node.instances.values()
            for r in other.requests.values()
            if r.prefill_left
        ),
        default=0.0,
    )
    own_s = times_of(instance, now_s).prefill_s(tokens, request.tokens - tokens)
    return limits.delivery_s_max + chunk_s + round_s(node, now_s) + own_s


def in_time_alone(
    instance: InstanceEntry, request: RequestEntry, now_s: float, limits: CellLimits
) -> bool:
    """Whether an instance could keep the request's SLO if its node did nothing else."""
    if instance.profile is None:
        return False
    factor, rule = instance.correction.factor(now_s), instance.node.rule
    cached = instance.cached_tokens(request)
    seconds = alone_s(instance.profile, request, rule, limits, factor, cached)
    return now_s + seconds <= request.due_s


def decodes_share(node: NodeEntry, now_s: float, without: DeploymentName | None = None) -> float:
    """What validation looks at first: one decode of each instance over its TPOT SLO, summed, of
    those to come, too. Were it above 1 with a request, that would be TPOT_EXCEEDED. On a full node
    that is the answer nearly always, so that it must not cost a copy of the schedule. `without` the
    instances of a deployment.
    """
    there = [i for i in node.instances.values() if i.deployment != without]
    return sum(_decode_share(i, now_s) for i in there if _has_work(i))


def batch_decode_s(instance: InstanceEntry, now_s: float) -> float:
    """The time of a decode of all requests that the instance has or will have; 0 where there is
    none.
    """
    return _decode_s(instance, now_s) if _has_work(instance) else 0.0


def node_prompts_s(node: NodeEntry, now_s: float) -> float:
    """Seconds in which a node computes its prompts, those of requests that wait for loads included,
    and brings the weights of their instances that are out.
    """
    total_s = 0.0
    for instance in node.instances.values():
        if instance.profile is None:
            continue  # it was loaded for nobody who is known, and goes
        work = (instance.requests or instance.coming).values()
        lefts = [(r, r.prefill_left if instance.requests else r.tokens) for r in work]
        prompts = [(request, left) for request, left in lefts if left]
        if prompts and node.swaps:
            out = 1.0 - instance.resident_share
            total_s += out * node.copy_s(instance.footprint.weights_bytes)
        for request, left in prompts:
            total_s += times_of(instance, now_s).prefill_s(left, request.tokens - left)
    return total_s


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
    if not batch or instance.mixed_slos:
        work = _work(instance)
        batch, tokens = len(work), sum(request.tokens for request in work)
    batch, tokens = batch + len(more), tokens + sum(request.tokens for request in more)
    return times_of(instance, now_s).decode_s(batch, tokens / batch + LOOKAHEAD_TOKENS)


def _has_work(instance: InstanceEntry) -> bool:
    """Whether requests run on it, or wait for its load: never both."""
    return bool(_work(instance))


def _work(instance: InstanceEntry) -> Collection[RequestEntry]:
    """Those requests, without best effort, which has what they leave."""
    work = (instance.requests or instance.coming).values()
    if not instance.mixed_slos:
        return work
    return [request for request in work if not request.slo.best_effort]


def _best_effort_s(node: NodeEntry, now_s: float) -> float:
    """The longest iteration of best effort that may just have begun on the node."""
    most_s = 0.0
    for instance in node.instances.values():
        if instance.mixed_slos and instance.profile is not None:
            of = [r for r in instance.requests.values() if r.slo.best_effort]
            times, context = times_of(instance, now_s), sum(r.tokens for r in of) / max(len(of), 1)
            most = best_effort_tokens(times, node.rule.chunk_tokens_max)
            left = min(sum(r.prefill_left for r in of), most)
            past = max((r.tokens - r.prefill_left for r in of if r.prefill_left), default=0)
            seconds = times.decode_s(len(of), context) if of else 0.0
            most_s = max(most_s, seconds + (times.prefill_s(left, past) if left else 0.0))
    return most_s


def times_of(instance: InstanceEntry, now_s: float) -> Times:
    """What predicts its iterations, corrected and overestimated as its node rule says."""
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
    pool = _pool(node, now_s) if node.swaps else None
    grows: list[tuple[float, float]] = []
    for instance in node.instances.values():
        work = _work(instance)
        if not work:
            continue
        run_queue = _run_queue(instance, instance.pace_s, now_s)
        run_queues[instance.instance_id] = run_queue
        if instance.requests:
            _fill(run_queue, instance, started_s, joining, after_loads, now_s)
            if pool is not None:
                grows += [(now_s, seconds) for seconds in _resizes_s(instance)]
            if pool is not None and pool.free_bytes < 0 and _grows(instance):
                after_loads += [(now_s, run_queue, prompt) for prompt in run_queue.prompts]
                run_queue.prompts = []
        else:
            ready_s = ends_s[instance.instance_id]
            if pool is not None:
                grows += [(ready_s, seconds) for seconds in _resizes_s(instance)]
            led: dict[RequestEntry | None, Prompt] = {}
            for request in work:
                prompt = led[request] = _prompt_on(instance, request)
                if request.leader in led:
                    led[request.leader].mates.append(prompt)
                else:
                    after_loads.append((ready_s, run_queue, prompt))
    schedule = Schedule(
        queues=list(run_queues.values()),
        now_s=now_s,
        best_effort_s=_best_effort_s(node, now_s),
        rule=node.turns,
        prefill_tokens_max=node.rule.chunk_tokens_max,
        turn_s_max=node.rule.turn_s_max,
        started_s=started_s,
        joining=joining,
        after_loads=after_loads,
        grows=grows,
        slowdown=node.load_slowdown,
        slow_until_s=max(ends_s.values(), default=0.0),
        margin_s=limits.delivery_s_max,
        pool=pool,
    )
    return schedule, run_queues


def _grows(instance: InstanceEntry) -> bool:
    """Whether its KV cache is to be larger than it is."""
    return instance.promised_blocks > instance.kv_blocks


def _resizes_s(instance: InstanceEntry) -> list[float]:
    """The seconds of its resizes that are under way, or wait; one that shrinks takes less."""
    node = instance.node
    return [node.grow_s(of.size.kv_bytes) for of in node.station.resizes(instance.instance_id)]


def _pool(node: NodeEntry, now_s: float) -> Pool:
    """The weights of the node, where it swaps, as it told last. A swap that should have ended is
    expected to take a share of its time yet, as a load is.
    """
    there = node.instances.values()
    pool = Pool(
        rule=cast(SwapRule, node.turns),  # A check takes a tenth of an event's time.
        held={
            each.instance_id: Held(
                weights_bytes=each.weights_bytes,
                copy_s=node.copy_s(each.weights_bytes),
                share=each.resident_share,
                due_s=min((r.arrival_s + BEHIND_S for r in each.best_effort), default=inf),
            )
            for each in there
        },
        free_bytes=node.capacity_bytes
        - node.station.promised.kv_bytes
        - sum(part_bytes(each.weights_bytes, each.resident_share) for each in there),
        away_s=node.away_s,
    )
    for each in there:
        if each.swap_began_s is not None:
            pool.begin(Swap(each.instance_id, each.swaps_to), each.swap_began_s)
            if pool.moved_s <= now_s:
                pool.moved_s = now_s + OVERDUE_SHARE * (pool.moved_s - each.swap_began_s)
            break
    return pool


def _run_queue(instance: InstanceEntry, pace_s: float, now_s: float) -> RunQueue:
    """An empty run queue. How many turns have passed it over is known to its node alone."""
    return RunQueue(
        instance_id=instance.instance_id, times=times_of(instance, now_s), tpot_s=pace_s
    )


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
    tpot_s = run_queue.tpot_s
    led: dict[RequestEntry | None, Prompt] = {}
    context_tokens = 0
    for request in _work(instance):
        left = request.prefill_left
        if not left:
            if request.pace_s == inf:
                continue
            if request.pace_s != tpot_s:
                mixed = True
            context_tokens += request.tokens
            dues_s.append(request.due_s)
            running.append(request.original.request_id)
            continue
        prompt = led[request] = _prompt(request, left)
        if request.leader in led:
            led[request.leader].mates.append(prompt)
        elif request.carried_s > now_s:
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
    return _prompt(request, request.tokens - instance.cached_tokens(request))


def _prompt(request: RequestEntry, left: int) -> Prompt:
    """The prompt of a request that has `left` tokens to compute."""
    return Prompt(
        request_id=request.request_id,
        left=left,
        past=request.tokens - left,
        due_s=request.due_s,
        slack_s=inf if request.output_tokens else request.slack_s,
        tpot_s=request.pace_s,
    )
