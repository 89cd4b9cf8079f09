"""Into a queue, and out of it: a request gets its place when it is entered into the books of an
instance and sent to its node. `requests.queueing` decides which place, and when.
"""

from bisect import insort

from mesh.core.controller.instances.kv_cache import Room, claim
from mesh.core.controller.instances.node_schedule import first_due_s, grace_s
from mesh.core.controller.state.cell import DeploymentEntry, InstanceEntry, RequestEntry
from mesh.core.controller.state.context import EventContext
from mesh.domain.actions import SendCommand
from mesh.domain.lifecycle import REQUEST, RequestState, advance
from mesh.domain.messages import SubmitRequest
from mesh.domain.request import RequestOrder


def enqueue(ctx: EventContext, entry: DeploymentEntry, held: RequestEntry) -> None:
    """Queue a request by its arrival: one that has run before goes ahead of those that came later.

    The queue may grow beyond its bound by such requests, of which there are no more than places.
    """
    held.queued_at_s = ctx.now_s
    insort(entry.queue, held, key=lambda waiting: waiting.arrival_s)
    ctx.cell.waiting[entry.spec.name] = None
    ctx.to_fill[entry.spec.name] = None


def submit(
    ctx: EventContext,
    entry: DeploymentEntry,
    held: RequestEntry,
    instance: InstanceEntry,
    room: Room,
) -> None:
    """Submit a queued request to a loaded instance that has this room for it."""
    node = instance.node
    if node.is_idle():
        node.iteration_started_s = ctx.now_s
    held.state = advance(REQUEST, held.state, RequestState.RUNNING)
    held.attempt += 1
    held.instance = instance
    held.grace_s = grace_s(instance, held)
    held.due_s = first_due_s(held) + held.grace_s
    held.submitted_s, held.prefill_left = ctx.now_s, held.tokens
    claim(ctx, entry, instance, held, room)
    instance.requests[held.request.request_id] = held
    instance.tokens += held.tokens
    ctx.decodes_shares.pop(node.node_id, None)
    entry.candidates.rank(instance)
    order = RequestOrder(
        request=held.request,
        attempt=held.attempt,
        output_tokens=tuple(held.output_tokens),
        slo=held.slo,
        age_s=ctx.now_s - held.arrival_s,
        grace_s=held.grace_s,
    )
    command = SubmitRequest(instance_id=instance.instance_id, order=order)
    ctx.act(SendCommand(link_id=node.link_id, command=command))
