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

from mesh.core.controller.instances.kv_cache import grow, request_blocks
from mesh.core.controller.requests.ending import (
    abort_on_node,
    cancel_migration,
    end,
    forget_place,
)
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import Orphan, RequestEntry
from mesh.domain.actions import DeliverTokens, TellAccepted
from mesh.domain.lifecycle import DeploymentState, RequestState
from mesh.domain.messages import HeldRequest
from mesh.domain.node_rule import Adopted
from mesh.domain.request import Request, RequestTokens, Resumed

SERVING = (DeploymentState.READY, DeploymentState.RETIRING)


def adopt(ctx: EventContext, node: NodeEntry, held: HeldRequest) -> Adopted | None:
    """Take a request over that a node has computed on with; None where it is to end there."""
    order, original = held.order, held.order.request
    request_id = original.request_id
    instance = node.instances.get(held.instance_id)
    entry = ctx.cell.deployments.get(original.deployment)
    known = ctx.cell.requests.get(request_id)
    if not original.keyed or not _is_whole(held) or request_id in ctx.cell.orphans:
        return None
    if entry is None or entry.deployment is None or entry.state not in SERVING:
        return None
    tokens = [*order.output_tokens, *(t for one in held.outputs for t in one.token_ids)]
    ended = bool(held.outputs) and held.outputs[-1].finish is not None
    if not ended and not _has_place(instance, entry):
        return None
    if known is None:
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
            ctx.act(DeliverTokens(outputs=outputs, node_id=node.node_id))
        if ended:
            end(ctx, known)
        else:
            ctx.dequeue(entry, known)
    if ended or instance is None:
        ctx.cell.note_served(entry, len(tokens), order.slo.name, met=known.is_met())
        return None
    _enter(ctx, entry, instance, known, held)
    return Adopted(request_id=request_id, attempt=order.attempt, next_index=len(tokens))


def _is_whole(held: HeldRequest) -> bool:
    """Whether one output follows the other, and the last one alone may end it."""
    counts = (len(one.token_ids) for one in held.outputs)
    due = list(accumulate(counts, initial=len(held.order.output_tokens)))
    whole = [one.first_index for one in held.outputs] == due[:-1] and held.order.attempt > 0
    return whole and all(one.finish is None for one in held.outputs[:-1])


def _has_place(instance: InstanceEntry | None, entry: DeploymentEntry) -> bool:
    """Whether a request of the deployment may run on the instance."""
    if instance is None or not instance.is_loaded or instance.deployment != entry.name:
        return False
    return instance.free_places > 0


def _waits_for(known: RequestEntry, held: HeldRequest) -> bool:
    """Whether what the node has goes on with this one: its client has come before the node, or it
    was queued as the node's link broke, and has gone nowhere since.
    """
    submitted = known.submissions in (0, held.order.attempt)
    same = len(known.original.prompt_tokens) == len(held.order.request.prompt_tokens)
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
    if request.waits_for is not None:
        ctx.note_released(request.waits_for)
        request.waits_for.expect_no_more(request, instance)
    request.take_attempt(held.order.attempt)
    blocks = request_blocks(entry, request, instance.footprint, instance.context_tokens_max)
    cached = request.tokens - min(held.prefill_left, request.tokens)
    instance.add(request, blocks=blocks, now_s=ctx.now_s, cached_tokens=cached)
    entry.rank(instance)
    grow(ctx, instance, request.due_s)


def claim(ctx: EventContext, original: Request, resumed: Resumed) -> bool:
    """A client comes for a request: whether a node has brought that along, and it goes on from
    where the client is. What does not go on from there ends.
    """
    orphan = ctx.cell.take_orphan(original.request_id)
    known = ctx.cell.requests.get(original.request_id)
    if orphan is not None:
        total = len(orphan.request.output_tokens)
        more = _after(orphan.outputs, len(resumed.output_tokens), total)
        if more is not None:
            ctx.act(TellAccepted(request_id=original.request_id, grace_s=0.0))
            for outputs in more:
                ctx.act(DeliverTokens(outputs=outputs, node_id=orphan.node_id))
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


def let_go(ctx: EventContext, request: RequestEntry) -> None:
    """The controller ends: the node of a request computes on, for the next one."""
    if request.migration is not None:
        cancel_migration(ctx, request.migration)
    forget_place(ctx, request)


def deliver(ctx: EventContext, tokens: DeliverTokens) -> None:
    """To the client of a request, or to be kept for it."""
    orphan = ctx.cell.orphans.get(tokens.outputs.request_id)
    if orphan is None:
        ctx.act(tokens)
    else:
        orphan.keep(tokens.outputs)
