"""What nodes say of the sizes of KV caches, and what becomes of promises that they cannot keep.

A shrink may fail, or stop at blocks in use; a node may come with more loaded than it has. Then more
is promised than there is, and what waits in the reservation station would wait forever. So at each
heartbeat of such a node whatever is too large is asked to shrink again; if that does not do, idle
instances go, and then what waits is taken back, the least urgent first.
"""

from mesh.core.controller.instances.kv_cache import park_cache, shrink
from mesh.core.controller.instances.lifecycle import unload
from mesh.core.controller.instances.reservations import let_go, send_started
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.messages import KvResized
from mesh.memory.station import ReservationKind


def resized(ctx: EventContext, node: NodeEntry, said: KvResized) -> None:
    """A resize has ended, as wanted or not. What a failed grow was for is served from the blocks
    that there are, or evicted when they do not do: it is tried again only after a pause.
    """
    instance = ctx.cell.instances.get(said.instance_id)
    if instance is None:
        return
    instance.note_size(said.kv_blocks)
    size = instance.footprint.size(said.kv_blocks)
    asked = node.station.running(instance.instance_id)
    if asked is not None and size.kv_bytes < asked.size.kv_bytes:
        instance.note_grow_failed(ctx.now_s + ctx.limits.grow_retry_s)
    send_started(ctx, node, node.station.done(instance.instance_id, size))
    ctx.wake_all()


def take_over(ctx: EventContext, instance: InstanceEntry, kv_blocks: int) -> None:
    """A heartbeat says how large a cache is: another size than the books have if an earlier link
    had asked for a resize. What is under way here answers for itself.
    """
    station = instance.node.station
    if kv_blocks != instance.kv_blocks and not station.running(instance.instance_id):
        instance.note_size(kv_blocks)
        size = instance.footprint.size(kv_blocks)
        send_started(ctx, instance.node, station.record(instance.instance_id, size))
        ctx.wake_all()


def restore(ctx: EventContext, node: NodeEntry) -> None:
    """Bring what is promised below the capacity again, if it is above."""
    station = node.station
    if station.free_bytes >= 0:
        return
    for instance in node.instances.values():
        if not station.is_pending(instance.instance_id):
            shrink(ctx, instance)
            park_cache(ctx, instance)
    idle = node.reclaimable_instances(ctx.now_s)
    # Where all are idle, one stays: the next request would have it loaded again, at the same size.
    spared = 1 if len(idle) == len(node.instances) else 0
    for instance in idle[: len(idle) - spared]:
        if station.free_bytes < 0:
            let_go(ctx, instance)
    for reservation in reversed(station.waiting()):
        if station.free_bytes >= 0:
            return
        instance = node.instances[reservation.instance_id]
        match reservation.kind:
            case ReservationKind.LOAD | ReservationKind.WAKE | ReservationKind.IMPORT:
                unload(ctx, instance)
                if instance.deployment in ctx.cell.deployments:
                    # Its deployment may be below its minimum now.
                    ctx.cell.note_minimum(instance.deployment, lacking=True)
            case ReservationKind.RESIZE if station.takes_memory(reservation):
                send_started(ctx, node, station.cancel(instance.instance_id))
            case ReservationKind.RESIZE | ReservationKind.UNLOAD:
                pass
