"""Into a queue, and out of it: a request gets its place when it is entered into the books of an
instance and sent to its node. `requests.queueing` decides which place, and when.
"""

from bisect import insort

from mesh.core.controller.instances.kv_cache import Room, claim
from mesh.core.controller.instances.node_schedule import first_due_s, grace_s
from mesh.core.controller.state.cell import DeploymentEntry, InstanceEntry
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import SendCommand
from mesh.domain.lifecycle import REQUEST, RequestState, advance
from mesh.domain.messages import SubmitRequest
from mesh.domain.request import RequestOrder


def enqueue(ctx: EventContext, entry: DeploymentEntry, request: RequestEntry) -> None:
    """Queue a request by its arrival: one that has run before goes ahead of those that came later.

    The queue may grow beyond its bound by such requests, of which there are no more than places.
    """
    request.queued_at_s = ctx.now_s
    insort(entry.queue, request, key=lambda waiting: waiting.arrival_s)
    ctx.cell.waiting[entry.spec.name] = None
    ctx.to_fill[entry.spec.name] = None


def submit(
    ctx: EventContext,
    entry: DeploymentEntry,
    request: RequestEntry,
    instance: InstanceEntry,
    room: Room,
) -> None:
    """Submit a queued request to a loaded instance that has this room for it."""
    node = instance.node
    if node.is_idle():
        node.iteration_started_s = ctx.now_s
    request.state = advance(REQUEST, request.state, RequestState.RUNNING)
    request.attempt += 1
    request.instance = instance
    request.grace_s = grace_s(instance, request)
    request.due_s = first_due_s(request) + request.grace_s
    request.submitted_s, request.prefill_left = ctx.now_s, request.tokens
    claim(ctx, entry, instance, request, room)
    instance.requests[request.original.request_id] = request
    instance.tokens += request.tokens
    ctx.decodes_shares.pop(node.node_id, None)
    entry.candidates.rank(instance)
    order = RequestOrder(
        request=request.original,
        attempt=request.attempt,
        output_tokens=tuple(request.output_tokens),
        slo=request.slo,
        age_s=ctx.now_s - request.arrival_s,
        grace_s=request.grace_s,
    )
    command = SubmitRequest(instance_id=instance.instance_id, order=order)
    ctx.act(SendCommand(link_id=node.link_id, command=command))
