"""When waiting has become pointless, and what the client is told then.

A new request is worth waiting for as long as its first token could be in time on a node that did
nothing else, or while an instance of its deployment loads, which is granted on top unless its
deployment wants it refused for that. One that was admitted before has a promise, and waits for as
long as any request may.
"""

from math import inf

from mesh.core.controller.instances.node_schedule import alone_s, first_due_s, grace_s
from mesh.core.controller.requests.ending import refuse
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.lifecycle import InstanceState
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import ColdStart
from mesh.request.shadow import Verdict


def refuse_too_late(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Refuse the requests in the deployment's queue that cannot be in time any more."""
    loading = any(i.state is InstanceState.LOADING for i in entry.instances.values())
    # Behind a head that was TPOT_EXCEEDED none was tried: it holds for requests of any length.
    no_time = bool(entry.queue) and entry.queue[0].refusals.verdict is Verdict.TPOT_EXCEEDED
    for request in list(entry.queue):
        waited_out = ctx.now_s - request.queued_at_s >= ctx.limits.queue_wait_s_max
        promised = request.attempt > 0 or not ctx.policy.refuses_late
        if not waited_out and (promised or not _too_late(ctx, entry, request, loading)):
            continue
        if no_time and request.refusals.verdict is None:
            request.refusals.note(Verdict.TPOT_EXCEEDED)
        reason, message = _why(ctx, entry, request)
        if _too_long(ctx, request):
            too_slow = ctx.cell.refusals.latest_start_s(request) == -inf
            remedy = "raise spec.slo.tpot_s" if too_slow else "shorten the prompt, or raise its SLO"
            refuse(ctx, request, reason, message, hint=f"no node is quick enough: {remedy}")
        else:
            refuse(ctx, request, reason, message, retry=True)


def _too_late(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry, loading: bool
) -> bool:
    """Whether its first token could not be in time any more on the quickest node of the cell."""
    latest_start_s = ctx.cell.refusals.latest_start_s(request)
    if latest_start_s is None:
        latest_start_s = first_due_s(request) - _quickest_s(ctx, entry, request)
        ctx.cell.refusals.note_latest_start(request, latest_start_s)
    if latest_start_s < request.arrival_s:
        return True
    may_be_late = request.slo.cold_start is ColdStart.LATE
    if (loading and may_be_late) or ctx.now_s < latest_start_s:
        return False
    granted_s = max((grace_s(instance, request) for instance in entry.candidates), default=0.0)
    return ctx.now_s >= latest_start_s + granted_s


def _too_long(ctx: EventContext, request: RequestEntry) -> bool:
    """Whether it would have been late even if it had computed at once, and alone."""
    latest_start_s = ctx.cell.refusals.latest_start_s(request)
    return latest_start_s is not None and latest_start_s < request.arrival_s


def _quickest_s(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> float:
    """Seconds to its first token on the quickest node, by measured profiles alone: a correction is
    of one instance, and passes. 0 where a node's profile is an estimate, which may be far off.
    """
    deployment = entry.deployment
    assert deployment is not None
    seen: dict[str, float] = {}
    for node in ctx.cell.nodes.values():
        if node.hello.fingerprint in seen or not ctx.takes(node, entry.spec):
            continue
        footprint = node.footprint_of(deployment)
        profile = ctx.cell.expectations.profile(deployment.model, footprint, node.hello)
        seconds = alone_s(profile, request, ctx.limits) if profile.measured else 0.0
        seen[node.hello.fingerprint] = seconds
    return min(seen.values(), default=0.0)


def _why(
    ctx: EventContext, entry: DeploymentEntry, request: RequestEntry
) -> tuple[RefusalReason, str]:
    waited = f"{ctx.now_s - request.queued_at_s:.1f} s"
    if not has_node(ctx, entry):
        if request.attempt:
            message = f"its node was lost, and no other came up within {waited}"
            return RefusalReason.NODE_LOST, message
        return RefusalReason.NO_NODE, f"no node came up within {waited}"
    if entry.load_failures and not entry.replicas():
        return RefusalReason.LOAD_FAILED, f"not loaded within {waited}: {entry.load_error}"
    name = repr(entry.spec.name)
    slo, prompt = request.slo, len(request.original.prompt_tokens)
    held_up = request.refusals.held_up if request.refusals.verdict else None
    if _too_long(ctx, request):
        never = ctx.cell.refusals.latest_start_s(request) == -inf
        held_up = Verdict.TPOT_EXCEEDED if never else Verdict.FIRST_TOKEN_LATE
    match held_up:
        case Verdict.FIRST_TOKEN_LATE:
            limit = f"{slo.ttft_limit_s(prompt):.3g} s"
            message = f"its first token would come after its limit, {limit} for {prompt} tokens"
            return RefusalReason.FIRST_TOKEN_LATE, message
        case Verdict.DELAYS_RUNNING:
            message = "it would make a request late that came before it"
            return RefusalReason.DELAYS_RUNNING, message
        case Verdict.TPOT_EXCEEDED:
            message = f"there is no time left to give {name} its tokens every {slo.tpot_s:.3g} s"
            return RefusalReason.TPOT_EXCEEDED, message
        case _ if request.refusals.short_of_memory:
            message = f"no memory came free for its KV cache within {waited}"
            return RefusalReason.MEMORY_FULL, message
        case _ if entry.replicas():
            return RefusalReason.QUEUE_TIMEOUT, f"no place came free within {waited}"
        case _:
            return RefusalReason.MEMORY_FULL, f"no memory came free on a node within {waited}"


def has_node(ctx: EventContext, entry: DeploymentEntry) -> bool:
    """Whether any node that takes new work may hold the deployment."""
    return any(ctx.takes(node, entry.spec) for node in ctx.cell.nodes.values())
