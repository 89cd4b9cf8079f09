"""Requests that outlive their controller: taken over from nodes, given to clients who come again.

A request with a key has an id that its key makes, under every controller of the cell. A node that
has lost its link computes on with it and tells of it in its next hello: here it gets back into the
books, whole or not at all. Its client may come before its node or after it. What is told between is
kept for it, for a while; one that comes for what nobody knows goes on after the tokens that it has,
as after a lost node. Tokens are told apart by their numbers alone: whether they are those that a
client has is looked at by `mesh.controller.gateway`. Before: `nodes`, `serving`. After: `serving`.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite

from mesh.core.controller.instances.kv_cache import grow, request_blocks
from mesh.core.controller.requests.ending import (
    abort_on_node,
    cancel_migration,
    end,
)
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import Orphan, RequestEntry
from mesh.domain.actions import DeliverTokens, RefuseRequest, TellAccepted
from mesh.domain.ids import NodeId
from mesh.domain.lifecycle import DeploymentState, RequestState
from mesh.domain.limits import ORPHANS_MAX
from mesh.domain.messages import HeldRequest
from mesh.domain.node_rule import Adopted
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request, RequestTokens, Resumed
from mesh.domain.revision import public_name
from mesh.domain.values import replace

SERVING = (DeploymentState.READY, DeploymentState.RETIRING)
AGE_S_MAX = 7 * 86_400.0
"""No request that a node brings along is older."""


def adopt(ctx: EventContext, node: NodeEntry, held: HeldRequest) -> Adopted | None:
    """Take a request over that a node has computed on with; None where it is to end there."""
    order, original = held.order, held.order.request
    request_id = original.request_id
    instance = node.instances.get(held.instance_id)
    entry = ctx.cell.deployments.get(original.deployment)
    known = ctx.cell.requests.get(request_id)
    if entry is None or entry.deployment is None or entry.state not in SERVING:
        return None
    if not _is_whole(held, entry.deployment.context_tokens_max) or request_id in ctx.cell.orphans:
        return None
    tokens = [*order.output_tokens, *(t for one in held.outputs for t in one.token_ids)]
    ended = bool(held.outputs) and held.outputs[-1].finish is not None
    if not ended and not _has_place(instance, entry):
        return None
    if known is None:
        gone = request_id in ctx.cell.ended  # its client was told its end
        if gone or len(ctx.cell.orphans) >= ORPHANS_MAX:
            return None
        pace = ctx.policy.pace(order.slo)
        known = RequestEntry(
            original=original,
            slo=order.slo,
            has_own_slo=not order.slo.name and order.slo != entry.spec.slo,
            pace=pace,
            arrival_s=ctx.now_s - order.age_s,
            accepted=True,
            slack_s=order.slack_s,
        )
        known.begin_after(ctx.cell.attempts_before(request_id, ctx.epoch))
        known.go_on_with(tokens, ctx.now_s + order.due_in_s, ctx.now_s)
        until_s = ctx.now_s + ctx.limits.adopted_s_max
        orphan = Orphan(
            request=known, node_id=node.node_id, until_s=until_s, outputs=list(held.outputs)
        )
        ctx.cell.add_orphan(orphan, ended=ended)
    else:
        more = _after(held.outputs, len(known.output_tokens), len(tokens))
        if more is None or not _waits_for(known, held):
            return None
        for outputs in more:
            if outputs.token_ids:
                known.note_tokens(outputs.token_ids, ctx.now_s)
        _hand_over(ctx, more, node.node_id)
        if ended:
            _note_served(ctx, known, held.outputs[-1])
            end(ctx, known)
        else:
            ctx.dequeue(entry, known)
    if ended or instance is None:
        return None
    _enter(ctx, entry, instance, known, held)
    return Adopted(request_id=request_id, attempt=order.attempt, next_index=len(tokens))


def _is_whole(held: HeldRequest, context_tokens_max: int) -> bool:
    """Whether it is of a client that may come again, all outputs are its own, one follows the
    other, the last one alone may end it, and no more tokens are there than it may have.
    """
    order, original = held.order, held.order.request
    counts = (len(one.token_ids) for one in held.outputs)
    due = list(accumulate(counts, initial=len(order.output_tokens)))
    prompt, sampling = len(original.prompt_tokens), original.sampling
    most = min(sampling.max_tokens, context_tokens_max - prompt)
    own = all(
        (one.request_id, one.attempt) == (original.request_id, order.attempt)
        for one in held.outputs
    )
    return (
        original.keyed
        and not original.is_one_of_several
        and own
        and prompt > 0
        and due[-1] <= most
        and [one.first_index for one in held.outputs] == due[:-1]
        and all(one.finish is None for one in held.outputs[:-1])
        and order.attempt > 0
        and isfinite(order.due_in_s)
        and 0.0 <= order.age_s < AGE_S_MAX
        and order.slack_s >= 0.0
    )


def _is_same_call(known: Request, other: Request) -> bool:
    """Whether both ask for the same, under the same key. Revisions of a deployment may differ."""
    same = len(known.prompt_tokens) == len(other.prompt_tokens)
    same = same and known.asked_digest == other.asked_digest
    return same and public_name(known.deployment) == public_name(other.deployment)


def _note_served(ctx: EventContext, request: RequestEntry, last: RequestTokens) -> None:
    """Its client is told its end."""
    if last.finish in (FinishReason.STOP, FinishReason.LENGTH):
        entry = ctx.cell.deployments.get(request.deployment)
        count, met = len(request.output_tokens), request.is_met()
        ctx.cell.note_served(entry, count, request.slo.name, met=met)


def _hand_over(ctx: EventContext, outputs: Sequence[RequestTokens], node_id: NodeId) -> None:
    """All of it to its client at once, who may read as few messages at a time as any."""
    if not outputs:
        return
    first, last = outputs[0], outputs[-1]
    together = replace(
        first,
        token_ids=tuple([token_id for one in outputs for token_id in one.token_ids]),
        text="".join([one.text for one in outputs]),
        logprobs=tuple([one_of for one in outputs for one_of in one.logprobs]),
        finish=last.finish,
    )
    ctx.act(DeliverTokens(outputs=together, node_id=node_id))


def _has_place(instance: InstanceEntry | None, entry: DeploymentEntry) -> bool:
    """Whether a request of the deployment may run on the instance."""
    if instance is None or not instance.is_loaded or instance.deployment != entry.name:
        return False
    return instance.free_places > 0


def _waits_for(known: RequestEntry, held: HeldRequest) -> bool:
    """Whether what the node has goes on with this one: its client has come before the node, or it
    was queued as the node's link broke, and has gone nowhere since.
    """
    original = held.order.request
    submitted = known.submissions in (known.submissions_before, held.order.attempt)
    # The tokens are those of one revision.
    same = known.deployment == original.deployment and _is_same_call(known.original, original)
    queued = known.state is RequestState.QUEUED and known.original.keyed
    return submitted and same and queued


def _after(
    outputs: Sequence[RequestTokens], count: int, total: int
) -> Sequence[RequestTokens] | None:
    """The outputs after so many tokens; None where none begins there."""
    if count < total:
        begins = [one.first_index for one in outputs]
        return outputs[begins.index(count) :] if count in begins else None
    if count > total:
        return None
    last = outputs[-1] if outputs else None
    if last is None or last.finish is None:
        return ()
    # Its client has all of it but its end.
    request_id, attempt, finish = last.request_id, last.attempt, last.finish
    return (
        RequestTokens(
            request_id=request_id, attempt=attempt, first_index=count, token_ids=(), finish=finish
        ),
    )


def _enter(
    ctx: EventContext,
    entry: DeploymentEntry,
    instance: InstanceEntry,
    request: RequestEntry,
    held: HeldRequest,
) -> None:
    """The request runs where its node has it, in the attempt that it has there."""
    blocks = request_blocks(entry, request, instance.footprint, instance.context_tokens_max)
    cached = request.tokens - min(held.prefill_left, request.tokens)
    instance.add(request, blocks=blocks, now_s=ctx.now_s, cached_tokens=cached)
    request.take_attempt(held.order.attempt)
    entry.rank(instance)
    grow(ctx, instance, request.due_s)


def claim(ctx: EventContext, original: Request, resumed: Resumed) -> bool:
    """A client comes for a request: whether a node has brought that along, and it goes on from
    where the client is. What does not go on from there ends, and so does any other one of its id.
    """
    orphan = ctx.cell.take_orphan(original.request_id)
    known = ctx.cell.requests.get(original.request_id)
    if orphan is not None and _is_same_call(orphan.request.original, original):
        total = len(orphan.request.output_tokens)
        more = _after(orphan.outputs, len(resumed.output_tokens), total)
        if more is not None:
            ctx.act(TellAccepted(request_id=original.request_id, grace_s=0.0))
            _hand_over(ctx, more, orphan.node_id)
            if orphan.request.state is RequestState.ENDED:
                _note_served(ctx, orphan.request, orphan.outputs[-1])
            return True
    if known is not None:
        abort_on_node(ctx, known)
        end(ctx, known)
    return False


def drop_old(ctx: EventContext) -> None:
    """The clients of these have not come in time."""
    for orphan in list(ctx.cell.orphans.values()):
        if ctx.now_s >= orphan.until_s:
            ctx.cell.take_orphan(orphan.request.request_id)
            if orphan.request.state is not RequestState.ENDED:
                abort_on_node(ctx, orphan.request)
                end(ctx, orphan.request)


def let_go(ctx: EventContext, request: RequestEntry, message: str) -> None:
    """The controller ends: the node of a request computes on for the next one, in the place that it
    has; its client is told to ask that.
    """
    if request.migration is not None:
        cancel_migration(ctx, request.migration)
    if ctx.cell.take_orphan(request.request_id) is None:
        refusal, request_id = RefusalReason.SHUTTING_DOWN, request.request_id
        ctx.act(RefuseRequest(request_id=request_id, reason=refusal, message=message))


def deliver(ctx: EventContext, tokens: DeliverTokens) -> None:
    """To the client of a request, or to be kept for it."""
    orphan = ctx.cell.orphans.get(tokens.outputs.request_id)
    if orphan is None:
        ctx.act(tokens)
    else:
        orphan.keep(tokens.outputs)
