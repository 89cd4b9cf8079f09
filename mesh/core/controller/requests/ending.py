"""How a request ends, exactly once: finished, refused with a reason, or silently when its client
has gone. Ending frees its place; what that makes possible is decided at the end of the event.
"""

from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.migration import Migration
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import RefuseRequest
from mesh.domain.lifecycle import MigrationState, RequestState
from mesh.domain.messages import AbortRequest, ContinueRequest
from mesh.domain.reasons import RefusalReason

RETRY_AFTER_S = 1.0
"""Clients that are refused for a reason that may pass are told to come again after this time:
nobody knows when it does.
"""
NODE_HELPS = frozenset(
    {
        *(RefusalReason.NO_NODE, RefusalReason.MEMORY_FULL, RefusalReason.FIRST_TOKEN_LATE),
        *(RefusalReason.DELAYS_RUNNING, RefusalReason.TPOT_EXCEEDED),
        *(RefusalReason.QUEUE_FULL, RefusalReason.QUEUE_TIMEOUT),
    }
)
"""Refusals for room or time, which a cell with a node more may spare its callers."""


def refuse(
    ctx: EventContext,
    request: RequestEntry,
    reason: RefusalReason,
    message: str,
    *,
    retry_after_s: float = 0.0,
    hint: str = "",
) -> None:
    """End a request with a reason, wherever it is; it may come again after so long, if above 0."""
    abort_on_node(ctx, request)
    owner = ctx.cell.deployments.get(request.original.deployment)
    ctx.cell.note_refused(owner, reason, request.slo.name)
    if owner is not None and reason in NODE_HELPS and not request.slo.best_effort:
        ctx.note_lack(owner, too_long=ctx.is_too_long(request))
    told = RefuseRequest(
        request_id=request.original.request_id,
        reason=reason,
        message=message,
        retry_after_s=retry_after_s,
        hint=hint,
    )
    # One whose client has not come yet ends without a word, and goes on with that.
    if ctx.cell.take_orphan(request.request_id) is None:
        ctx.act(told)
    if request.original.answers > 1:
        ctx.cell.note_refused_call(told)
    end(ctx, request)


def refuse_all_queued(
    ctx: EventContext,
    entry: DeploymentEntry,
    reason: RefusalReason,
    message: str,
    *,
    retry_after_s: float = 0.0,
    hint: str = "",
) -> None:
    for request in list(entry.queue):
        refuse(ctx, request, reason, message, retry_after_s=retry_after_s, hint=hint)


def abort_on_node(ctx: EventContext, request: RequestEntry) -> None:
    """Take the request off its instance, on the node and in the books. Queued ones have none. A
    migration of it is given up.
    """
    migration = request.migration
    if migration is not None and not request.is_copy:
        cancel_migration(ctx, migration)
    if request.instance is None:
        return
    command = AbortRequest(request_id=request.original.request_id, attempt=request.attempt)
    ctx.send(request.instance.node, command)
    forget_place(ctx, request)


def forget_place(ctx: EventContext, request: RequestEntry) -> None:
    """Take the request off its instance in the books."""
    instance = request.instance
    if instance is None:
        return
    instance.remove(request)
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.rank(instance)
    ctx.note_released(instance)


def cancel_migration(ctx: EventContext, migration: Migration) -> None:
    """The request stays what it is; its copy goes, on its node and in the books."""
    pause(ctx, migration, paused=False)
    migration.advance(MigrationState.GIVEN_UP)
    ctx.cell.remove_migration(migration)
    abort_on_node(ctx, migration.copy)


def pause(ctx: EventContext, migration: Migration, *, paused: bool) -> None:
    """Hold a request that moves where it runs, for an iteration of others at most, or let it go on;
    where its engine cannot hold it, it goes on.
    """
    request = migration.request
    source = request.instance
    if (
        source is None
        or paused is (migration.paused_s is not None)
        or not source.node.hello.computes_ahead
    ):
        return
    migration.note_paused(ctx.now_s if paused else None)
    command = ContinueRequest(
        instance_id=source.instance_id,
        request_id=request.original.request_id,
        attempt=request.attempt,
        token_ids=(),
        paused=paused,
        due_in_s=request.due_s - ctx.now_s,
    )
    ctx.send(source.node, command)


def evict_best_effort(ctx: EventContext, instance: InstanceEntry) -> None:
    """Send the last request of best effort that came to an instance back to its queue, with its
    tokens so far. There has to be one.
    """
    request = instance.best_effort[-1]
    request.note_evicted()
    ctx.note_evicted(request)
    abort_on_node(ctx, request)
    entry = ctx.cell.deployments.get(request.original.deployment)
    if entry is not None:
        ctx.enqueue(entry, request)
    else:
        message = "its deployment has gone"
        refuse(ctx, request, RefusalReason.DEPLOYMENT_DELETED, message)


def end(ctx: EventContext, request: RequestEntry) -> None:
    """The request is over; whoever must know has been told."""
    if request.migration is not None:
        cancel_migration(ctx, request.migration)
    entry = ctx.cell.deployments.get(request.original.deployment)
    if request.state is RequestState.QUEUED and entry is not None and request in entry.queue:
        ctx.dequeue(entry, request)
    ctx.cell.remove_request(request)
    forget_place(ctx, request)
