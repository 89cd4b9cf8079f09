"""The life of a request as the controller decides it: checked, queued, streamed, moved, ended."""

from mesh.core.controller.instances.kv_cache import batch_max, grow, missing_bytes, note_longer
from mesh.core.controller.instances.open_options import OpenOptions
from mesh.core.controller.requests import migration, resuming
from mesh.core.controller.requests.ending import (
    RETRY_AFTER_S,
    abort_on_node,
    cancel_migration,
    end,
    evict_best_effort,
    refuse,
)
from mesh.core.controller.requests.preemption import preempt
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import DeliverTokens, RefuseRequest, StoreHistory, TellAccepted
from mesh.domain.ids import RequestId
from mesh.domain.lifecycle import DeploymentState
from mesh.domain.messages import PrefixMissed, RequestReturned
from mesh.domain.model import ENCODERS
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request, RequestTokens, Resumed
from mesh.domain.slo import Slo
from mesh.domain.values import replace


def invoke(
    ctx: EventContext, original: Request, own: Slo | None, resumed: Resumed | None = None
) -> None:
    """A new request, perhaps with the SLO of a class or one of its own: refuse it at once, or queue
    it; the end of the event places what it can. One that is `resumed` goes on after the tokens that
    its client has; where an earlier controller accepted it, it waits for a place as after a lost
    node.
    """
    if resuming.claim(ctx, original, resumed or Resumed()):
        return
    name = original.deployment
    leader = None if original.first is None else ctx.cell.requests.get(original.first)
    told = None if original.first is None else ctx.cell.refused_calls.get(original.first)
    if told is not None:
        entry = ctx.cell.current(name)
        ctx.cell.note_refused(entry, told.reason, "" if own is None else own.name)
        ctx.act(replace(told, request_id=original.request_id))
        return
    entry, serving = ctx.cell.current(name), [DeploymentState.READY]
    if leader is not None:
        # The revision that it came to serves what has come to it.
        entry = ctx.cell.deployments.get(leader.deployment)
        serving.append(DeploymentState.RETIRING)
    if entry is None or entry.state not in serving or entry.deployment is None:
        ctx.cell.note_refused(entry, RefusalReason.UNKNOWN_DEPLOYMENT)
        ctx.act(
            RefuseRequest(
                request_id=original.request_id,
                reason=RefusalReason.UNKNOWN_DEPLOYMENT,
                message=f"there is no deployment {name!r}",
            )
        )
        return
    if entry.name != name:
        # It stays with this revision, whose model's tokens it has.
        original = replace(original, deployment=entry.name)
    entry.note_call(ctx.now_s)
    entry.note_arrival(len(original.prompt_tokens), ctx.now_s)
    slo = own or entry.spec.slo
    pace = ctx.policy.pace(slo)
    answer_tokens = min(entry.history.mean_of(slo.name), original.sampling.max_tokens)
    request = RequestEntry(
        original=original,
        slo=slo,
        has_own_slo=own is not None and not own.name,
        pace=pace,
        arrival_s=ctx.now_s,
        queued_at_s=ctx.now_s,
        slack_s=pace.slack_s(slo, answer_tokens),
        leader=leader,
    )
    if original.keyed:
        request.begin_after(ctx.cell.attempts_before(original.request_id, ctx.epoch))
    accepted = resumed is not None and resumed.accepted
    if resumed is not None:
        request.resume(resumed, ctx.now_s)
    ctx.cell.add_request(request)
    if accepted:
        ctx.act(TellAccepted(request_id=original.request_id, grace_s=0.0))
    prompt, context = len(original.prompt_tokens), entry.deployment.context_tokens_max
    if prompt >= context:
        message = f"the prompt has {prompt} tokens; the context of {name!r} holds {context}"
        hint = ""
        if entry.deployment.model.architecture in ENCODERS:
            hint = f"split the text: {name!r} is an encoder, and takes {context - 1} tokens at most"
        refuse(ctx, request, RefusalReason.PROMPT_TOO_LONG, message, hint=hint)
    elif accepted:
        ctx.enqueue(entry, request)
    elif not ctx.has_node(entry.spec):
        message, hint = ctx.why_no_node(entry.spec)
        refuse(ctx, request, RefusalReason.NO_NODE, message, retry_after_s=RETRY_AFTER_S, hint=hint)
    elif original.answers > 1 and original.answers > (most := _answers_max(ctx, entry)):
        message = f"{original.answers} answers are wanted; an instance computes {most} at a time"
        refuse(ctx, request, RefusalReason.MEMORY_FULL, message, hint=f"ask for {most} at most")
    elif _cannot_load(ctx, entry):
        again_s = entry.pause_left_s(ctx.now_s)
        refuse(ctx, request, RefusalReason.LOAD_FAILED, entry.load_error, retry_after_s=again_s)
    elif (waiting := entry.queued_of(slo.name)) >= ctx.limits.queue_requests_max:
        of = f"{name!r}, class {slo.name!r}," if slo.name else repr(name)
        message = f"{waiting} requests of {of} wait already, which is the limit"
        refuse(ctx, request, RefusalReason.QUEUE_FULL, message, retry_after_s=RETRY_AFTER_S)
    else:
        ctx.enqueue(entry, request)


def _answers_max(ctx: EventContext, entry: DeploymentEntry) -> int:
    """The most answers of a call that an instance on one of the nodes computes at a time."""
    nodes = [node for node in ctx.cell.nodes.values() if ctx.takes(node, entry.spec)]
    return max([batch_max(ctx, entry, node) for node in nodes], default=ctx.limits.batch_max)


def _cannot_load(ctx: EventContext, entry: DeploymentEntry) -> bool:
    """Its loads failed too often in a row, none is under way, and the next try is not due."""
    given_up = entry.load_failures >= ctx.limits.load_attempts_max
    return given_up and not entry.replicas() and ctx.now_s < entry.paused_until_s


def deliver(ctx: EventContext, outputs: RequestTokens) -> None:
    """New tokens from a node. Those of an earlier attempt, or of a request that ended, are not
    for anyone; a gap means that the node lost track, and the request starts anew from its tokens.
    """
    request = ctx.cell.requests.get(outputs.request_id)
    if request is None:
        return
    moves = request.migration
    if moves is not None and moves.copy.attempt == outputs.attempt:
        if not migration.copy_yielded(ctx, moves, outputs):
            return
    elif request.attempt != outputs.attempt:
        return
    instance = request.instance
    if instance is None:
        return
    if outputs.first_index != len(request.output_tokens):
        message = f"token {len(request.output_tokens)} was due, {outputs.first_index} came"
        requeue(ctx, request, RefusalReason.ENGINE_FAILED, message)
        return
    if not outputs.first_index:
        owner = ctx.cell.deployments.get(request.original.deployment)
        if owner is not None and request.original.first is None:
            owner.note_prompt(len(request.original.prompt_tokens), outputs.cached_tokens)
    instance.note_tokens(request, outputs.token_ids, ctx.now_s)
    if outputs.finish is None:
        if not outputs.first_index and ctx.policy.goes_on:
            ctx.note_begun(request)
        note_longer(ctx, instance, request)
        resuming.deliver(ctx, DeliverTokens(outputs=outputs))
        if request.migration is not None:
            migration.tokens_came(ctx, request.migration)
        return
    node_id = instance.node.node_id
    resuming.deliver(ctx, DeliverTokens(outputs=outputs, node_id=node_id))
    if outputs.finish in (FinishReason.STOP, FinishReason.LENGTH):
        owner = ctx.cell.deployments.get(request.original.deployment)
        tokens, met = len(request.output_tokens), request.is_met()
        # One token after one is a call that loads, such as Ollama's: it tells nothing of lengths.
        original = request.original
        loads = len(original.prompt_tokens) == original.sampling.max_tokens == 1
        ctx.cell.note_served(owner, tokens, request.slo.name, met=met, loads=loads)
        if owner is not None:
            _store_history(ctx, owner)
    end(ctx, request)


def _store_history(ctx: EventContext, owner: DeploymentEntry) -> None:
    if ctx.now_s - owner.history_stored_s >= ctx.limits.history_store_s:
        owner.note_history_stored(ctx.now_s)
        ctx.act(StoreHistory(name=owner.spec.name, history=owner.history))


def cancel(ctx: EventContext, request_id: RequestId) -> None:
    """The client has gone: free its place, wherever it is, and tell it nothing more."""
    request = ctx.cell.requests.get(request_id)
    if request is not None:
        abort_on_node(ctx, request)
        end(ctx, request)


def grow_or_evict(ctx: EventContext, instance: InstanceEntry) -> None:
    """The instance's KV blocks do not do for its requests. Unless more are on their way, it grows;
    if it cannot, best effort beside others leaves, or smaller neighbours go; else the request that
    the policy evicts gives its own up and continues elsewhere, or later, with its tokens so far
    (LLM-Mesh §6.4).
    """
    missing = instance.required_blocks > instance.kv_blocks
    if not missing or instance.node.station.is_pending(instance.instance_id):
        return
    copies = [request for request in instance.requests.values() if request.is_copy]
    if copies:
        # Who runs elsewhere still can stay there.
        for copy in copies:
            _lost_copy(ctx, copy)
        return
    owner = ctx.cell.deployments.get(instance.deployment)
    if grow(ctx, instance, ctx.now_s):
        return
    if 0 < len(instance.best_effort) < instance.batch:
        evict_best_effort(ctx, instance)
        return
    if owner is not None:
        lacking = missing_bytes(ctx, owner, instance)
        if preempt(ctx, instance, lacking) and grow(ctx, instance, ctx.now_s):
            return
    chosen = ctx.policy.evict(instance, OpenOptions(ctx=ctx, entry=owner))
    evicted = instance.requests[chosen.request_id]
    evicted.note_evicted()
    message = (
        f"evicted from {instance.instance_id}: its {instance.kv_blocks} KV blocks did not do for "
        f"{instance.batch} requests"
    )
    requeue(ctx, evicted, RefusalReason.MEMORY_FULL, message)


def returned(ctx: EventContext, report: RequestReturned) -> None:
    """A node returns a request unfinished: its instance broke, or would not take it."""
    request = ctx.cell.requests.get(report.request_id)
    moves = request.migration if request is not None else None
    if moves is not None and moves.copy.attempt == report.attempt:
        cancel_migration(ctx, moves)
    elif request is not None and request.attempt == report.attempt and request.instance is not None:
        requeue(ctx, request, RefusalReason.ENGINE_FAILED, report.message)


def miss(ctx: EventContext, missed: PrefixMissed) -> None:
    """What a request was submitted for was in part gone when it came. Nobody's deadline was looked
    at with so much left to compute: it is placed anew, here or elsewhere, where it has a token yet
    to come in time; one that is computed ahead goes on.
    """
    request = ctx.cell.requests.get(missed.request_id)
    moves = request.migration if request is not None else None
    copy = moves.copy if moves is not None and moves.copy.attempt == missed.attempt else request
    if copy is None or copy.instance is None or copy.attempt != missed.attempt:
        return
    copy.note_prefill_left(copy.tokens - missed.cached_tokens)
    # Its node tells what has gone with its next heartbeat; the request is placed before that.
    copy.instance.forget_prefix(copy, missed.cached_tokens)
    if not copy.is_copy:
        copy.note_evicted()
        message = f"what {copy.instance.instance_id} had cached of it was gone"
        requeue(ctx, copy, RefusalReason.DELAYS_RUNNING, message)


def requeue(ctx: EventContext, request: RequestEntry, reason: RefusalReason, message: str) -> None:
    """Back into its queue with the tokens so far, if it has an attempt left."""
    if request.is_copy:
        _lost_copy(ctx, request)
        return
    abort_on_node(ctx, request)
    entry = ctx.cell.deployments.get(request.original.deployment)
    evicted = request.evictions > ctx.limits.evictions_max and not request.slo.best_effort
    last = request.failures >= ctx.limits.attempts_max or evicted
    if last or entry is None:
        refuse(
            ctx,
            request,
            reason,
            f"{message}; attempt {request.attempt - request.submissions_before} was the last",
            retry_after_s=RETRY_AFTER_S,
        )
        return
    ctx.enqueue(entry, request)


def _lost_copy(ctx: EventContext, copy: RequestEntry) -> None:
    """What was computed ahead is gone, or has to go: the request stays where it is."""
    moves = ctx.cell.migrations.get(copy.original.request_id)
    if moves is not None and moves.copy is copy:
        cancel_migration(ctx, moves)
