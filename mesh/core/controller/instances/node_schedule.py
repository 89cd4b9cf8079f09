"""What the controller knows of a node's schedule, as shadow validation takes it.

Read from the live entries of one node for each validation; nothing else of the cell is looked at.
Reports lag behind the node by the link's delay, so that the iteration in flight is inferred: the
node began it when it reported the one before.
"""

from collections.abc import Sequence
from math import inf

from mesh.compute.times import Times
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.profile import Profile
from mesh.domain.slo import ColdStart, Slo, due_s
from mesh.request.run_queues import Prompt, RunQueue
from mesh.request.shadow import (
    LOOKAHEAD_TOKENS,
    OVERESTIMATE,
    Newcomer,
    Schedule,
    Verdict,
    validate,
)

OVERDUE_SHARE = 0.25
"""A load that should have ended is expected to take this share of its expected time yet."""


def verdict_on(
    instance: InstanceEntry,
    request: RequestEntry,
    *,
    next_due_s: float,
    now_s: float,
    limits: CellLimits,
    beside: Sequence[RequestEntry] = (),
    may_be_late: bool = False,
    moves: bool = False,
) -> Verdict:
    """Whether a loaded instance can take a request whose next token is due at `next_due_s`, and
    those beside it that have been promised it already. One that `moves` runs well where it is: it
    does not try out an estimate.
    """
    node = instance.node
    if instance.correction.trial_left and (instance.requests or beside):
        return Verdict.DELAYS_RUNNING
    estimated = not (instance.profile and instance.profile.measured)
    if estimated and not moves and _finds_out(node, next_due_s, now_s, may_be_late):
        return Verdict.PASSES
    if _decodes_share_with(instance, request, now_s) > 1.0:
        return Verdict.TPOT_EXCEEDED
    schedule, run_queues = _schedule(node, now_s, limits)
    run_queue = run_queues.get(instance.instance_id)
    if run_queue is None:
        run_queue = _run_queue(instance, request.slo, now_s)
        if beside:
            schedule.queues.append(run_queue)
    coming = [(run_queue, _prompt(other, first_due_s(other) + other.grace_s)) for other in beside]
    schedule.joining = (*schedule.joining, *coming)
    newcomer = Newcomer(
        queue=run_queue, prompt=_prompt(request, next_due_s), joins_s=now_s, may_be_late=may_be_late
    )
    return validate(schedule, newcomer)


def verdict_on_start(
    node: NodeEntry,
    profile: Profile,
    load_s: float,
    request: RequestEntry,
    *,
    share: float,
    next_due_s: float,
    now_s: float,
    limits: CellLimits,
    may_be_late: bool = False,
    moves: bool = False,
) -> Verdict:
    """Whether a node can take a new instance, whose load takes `load_s`, for this request, whose
    next token is due at `next_due_s`. `share` is the node's `decodes_share`. `moves` as above.
    """
    if not profile.measured and not moves and _finds_out(node, next_due_s, now_s, may_be_late):
        return Verdict.PASSES
    times = Times(profile, OVERESTIMATE)
    decode_s = times.decode_s(1, request.tokens + LOOKAHEAD_TOKENS)
    if share + decode_s / request.slo.tpot_s > 1.0:
        return Verdict.TPOT_EXCEEDED
    schedule, _ = _schedule(node, now_s, limits)
    run_queue = RunQueue(instance_id=InstanceId("new"), times=times, tpot_s=request.slo.tpot_s)
    newcomer = Newcomer(
        queue=run_queue,
        prompt=_prompt(request, next_due_s),
        joins_s=now_s + load_s,
        loads=True,
        may_be_late=may_be_late,
    )
    return validate(schedule, newcomer)


def _finds_out(node: NodeEntry, next_due_s: float, now_s: float, may_be_late: bool) -> bool:
    """Whether a request may try out an estimated profile, which may be far off: alone on its node,
    and only if its token can still be in time, or may be late.
    """
    return node.is_idle() and (may_be_late or next_due_s > now_s)


def first_due_s(request: RequestEntry) -> float:
    """When the next token of a request that waits is due; load time that it is granted comes on
    top.
    """
    return due_s(
        start_s=request.arrival_s,
        ttft_limit_s=request.slo.ttft_limit_s(len(request.original.prompt_tokens)),
        tpot_s=request.slo.tpot_s,
        output_tokens=len(request.output_tokens),
    )


def grace_s(instance: InstanceEntry, request: RequestEntry) -> float:
    """Load time of the instance that the request has waited for, if it may be late for that."""
    if request.slo.cold_start is ColdStart.REFUSE or instance.loaded_at_s <= request.arrival_s:
        return request.grace_s
    waited_s = instance.loaded_at_s - max(request.arrival_s, instance.load_started_s)
    return max(request.grace_s, waited_s)


def alone_s(
    profile: Profile, request: RequestEntry, limits: CellLimits, factor: float = 1.0
) -> float:
    """How long a request's next token takes on a node that does nothing else; infinite if its
    further ones could not keep their pace there.
    """
    times = Times(profile, factor * OVERESTIMATE)
    if times.decode_s(1, request.tokens + LOOKAHEAD_TOKENS) > request.slo.tpot_s:
        return inf
    left, past, total_s = request.tokens, 0, limits.delivery_s_max
    while left > 0:
        tokens = min(left, limits.prefill_tokens_max)
        total_s += times.prefill_s(tokens, past)
        left, past = left - tokens, past + tokens
    return total_s


def in_time_alone(
    instance: InstanceEntry, request: RequestEntry, now_s: float, limits: CellLimits
) -> bool:
    """Whether an instance could keep the request's SLO if its node did nothing else."""
    if instance.profile is None:
        return False
    seconds = alone_s(instance.profile, request, limits, instance.correction.factor(now_s))
    return now_s + seconds <= first_due_s(request) + grace_s(instance, request)


def decodes_share(node: NodeEntry, now_s: float) -> float:
    """What validation looks at first: one decode of each instance over its TPOT SLO, summed. Were
    it above 1 with a request, that would be TPOT_EXCEEDED. On a full node that is the answer nearly
    always, so that it must not cost a copy of the schedule.
    """
    computing = [i for i in node.instances.values() if _computes(i)]
    return sum(_decode_share(i, len(i.requests), i.tokens, now_s) for i in computing)


def _decodes_share_with(into: InstanceEntry, request: RequestEntry, now_s: float) -> float:
    """The `decodes_share` of its node, were the request on the instance."""
    share = 0.0
    for instance in into.node.instances.values():
        if instance is into and instance.requests:
            batch, tokens = len(into.requests) + 1, into.tokens + request.tokens
            share += _decode_share(into, batch, tokens, now_s)
        elif _computes(instance):
            share += _decode_share(instance, len(instance.requests), instance.tokens, now_s)
    if not into.requests:
        decode_s = _times(into, now_s).decode_s(1, request.tokens + LOOKAHEAD_TOKENS)
        share += decode_s / request.slo.tpot_s
    return share


def _decode_share(instance: InstanceEntry, batch: int, tokens: int, now_s: float) -> float:
    tpot_s = next(iter(instance.requests.values())).slo.tpot_s
    return _times(instance, now_s).decode_s(batch, tokens / batch + LOOKAHEAD_TOKENS) / tpot_s


def _computes(instance: InstanceEntry) -> bool:
    return bool(instance.requests) and instance.state is not InstanceState.LOADING


def _times(instance: InstanceEntry, now_s: float) -> Times:
    assert instance.profile is not None
    return Times(instance.profile, instance.correction.planned(now_s) * OVERESTIMATE)


def _schedule(
    node: NodeEntry, now_s: float, limits: CellLimits
) -> tuple[Schedule, dict[InstanceId, RunQueue]]:
    run_queues: dict[InstanceId, RunQueue] = {}
    joining: list[tuple[RunQueue, Prompt]] = []
    started_s = node.iteration_started_s
    slow_until_s = 0.0
    for instance in node.instances.values():
        if instance.state is InstanceState.LOADING:
            slow_until_s = max(slow_until_s, _load_ends_s(instance, now_s))
        elif _computes(instance):
            slo = next(iter(instance.requests.values())).slo
            run_queue = run_queues[instance.instance_id] = _run_queue(instance, slo, now_s)
            _fill(run_queue, instance, started_s, joining, now_s)
    schedule = Schedule(
        queues=list(run_queues.values()),
        now_s=now_s,
        prefill_tokens_max=limits.prefill_tokens_max,
        turn_s_max=limits.turn_s_max,
        started_s=started_s,
        joining=joining,
        slowdown=node.load_slowdown,
        slow_until_s=slow_until_s,
        margin_s=limits.delivery_s_max,
    )
    return schedule, run_queues


def _run_queue(instance: InstanceEntry, slo: Slo, now_s: float) -> RunQueue:
    """An empty run queue. How many turns have passed it over is known to its node alone."""
    return RunQueue(
        instance_id=instance.instance_id, times=_times(instance, now_s), tpot_s=slo.tpot_s
    )


def _fill(
    run_queue: RunQueue,
    instance: InstanceEntry,
    started_s: float | None,
    joining: list[tuple[RunQueue, Prompt]],
    now_s: float,
) -> None:
    """Put the instance's requests into its run queue; those that came after the iteration began
    join.
    """
    dues_s = run_queue.dues_s
    context_tokens = 0
    for request in instance.requests.values():
        left = request.prefill_left
        if not left:
            context_tokens += request.tokens
            dues_s.append(request.due_s)
            continue
        prompt = Prompt(left=left, past=request.tokens - left, due_s=request.due_s)
        if started_s is not None and request.submitted_s > started_s:
            joining.append((run_queue, prompt))
        else:
            run_queue.prompts.append(prompt)
    run_queue.batch, run_queue.context_tokens = len(dues_s), context_tokens
    run_queue.sort_dues(now_s)
    run_queue.predict()


def _prompt(request: RequestEntry, due_s: float) -> Prompt:
    """Of a request that has to be computed from its first token."""
    return Prompt(left=request.tokens, past=0, due_s=due_s)


def _load_ends_s(instance: InstanceEntry, now_s: float) -> float:
    expected_s = instance.load_started_s + instance.load_s
    return max(expected_s, now_s + instance.load_s * OVERDUE_SHARE)
