"""How many instances a deployment has: at least its minimum, as far as there is room, and no more
than its maximum. Its plan may want more, where memory is free.

Beyond the minimum those who wait ask for instances (`queueing`), and idle ones go by their
keep-alive. What starts and ends a single instance is in `instances.lifecycle`.
"""

from collections.abc import Collection

from mesh.core.controller.instances.lifecycle import drain, start
from mesh.core.controller.requests.search import InstanceNeeds, Search, StartNodes
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.lifecycle import InstanceState


def start_instance(
    ctx: EventContext, entry: DeploymentEntry, among: Collection[NodeEntry] | None = None
) -> bool:
    """Start loading an instance that no request asks for, in the place of idle ones where there is
    no room else, and on one of these nodes if they are given; False when none has room.
    """
    nodes = ctx.cell.nodes.values() if among is None else among
    price = Search(ctx=ctx, entry=entry, start_nodes=StartNodes(lambda: nodes)).first()
    if price is not None:
        start(ctx, price)
    return price is not None


def keep_minimum(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Load instances until `replicas_min` serve or will, as far as there is room."""
    ctx.cell.note_minimum(entry.spec.name, lacking=False)
    if not entry.spec.scaling.replicas_min:
        return
    if entry.deployment is None or ctx.now_s < entry.paused_until_s:
        return
    while (before := entry.replicas()) < entry.spec.scaling.replicas_min:
        start_instance(ctx, entry)
        if entry.replicas() == before:
            ctx.cell.note_minimum(entry.spec.name, lacking=True)
            return


def warm(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Load instances until as many serve or will as its plan wants, where memory is free: what a
    plan expects takes nothing from anybody who is there.
    """
    while (before := entry.replicas()) < entry.warm and ctx.now_s >= entry.paused_until_s:
        needs = InstanceNeeds(ctx, entry, ())
        rooms = [(node, needs.room(node)) for node in ctx.cell.nodes.values()]
        free = [node for node, room in rooms if room is not None and not room.unloads]
        start_instance(ctx, entry, free)
        if entry.replicas() == before:
            return


def keep_minima(ctx: EventContext) -> None:
    """An instance became idle: its memory may be what a deployment below its minimum lacks."""
    for name in list(ctx.cell.below_minimum):
        keep_minimum(ctx, ctx.cell.deployments[name])


def trim_to_maximum(ctx: EventContext, entry: DeploymentEntry) -> None:
    """Drain instances above `replicas_max`: first those that load or are parked, then the smallest
    batch.
    """
    if len(entry.instances) <= entry.spec.scaling.replicas_max:
        return
    serving = [i for i in entry.instances.values() if i.takes_requests]
    serving.sort(key=lambda i: (i.state is InstanceState.READY, i.batch, i.instance_id))
    for instance in serving[: max(0, len(serving) - entry.spec.scaling.replicas_max)]:
        drain(ctx, instance)


def room_changed(ctx: EventContext) -> None:
    """A node, or memory of one, came or went: instances of any deployment may start or go."""
    ctx.wake_all()
    for entry in ctx.cell.deployments.values():
        trim_to_maximum(ctx, entry)
        keep_minimum(ctx, entry)
