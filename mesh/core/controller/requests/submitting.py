"""Out of a queue: a request gets its place when it is entered into the books of an instance and
sent to its node. `requests.queueing` decides which place, and when.
"""

from mesh.core.controller.instances.kv_cache import Room, claim
from mesh.core.controller.instances.node_schedule import first_due_s, grace_s
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.actions import SendCommand, TellAccepted
from mesh.domain.messages import SubmitRequest
from mesh.domain.request import RequestOrder


def submit(
    ctx: EventContext,
    entry: DeploymentEntry,
    request: RequestEntry,
    instance: InstanceEntry,
    room: Room,
) -> None:
    """Submit a queued request to a loaded instance that has this room for it."""
    node = instance.node
    granted_s = grace_s(instance, request)
    due_s = first_due_s(request) + granted_s
    claim(ctx, entry, instance, request, room, due_s=due_s, grace_s=granted_s)
    entry.rank(instance)
    if request.attempt == 1:
        ctx.act(TellAccepted(request_id=request.original.request_id, grace_s=request.grace_s))
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
