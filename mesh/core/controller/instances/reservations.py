"""Loads, resizes and unloads of a node: promised against its memory, and sent when they may start.

Every one is issued to the node's reservation station (`mesh.memory.station`), which refuses what
does not fit and holds back what has to wait until memory has come free; what it says may start is
sent to the node. Before: `placement` and `kv_cache`, which decide sizes. After: the node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mesh.core.controller.instances.begun_load import begun_load_s
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import SendCommand
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import LoadInstance, ResizeKv, UnloadInstance
from mesh.domain.model import NOTHING, Size
from mesh.memory.station import LOADS, Reservation, ReservationKind


def issue(
    ctx: EventContext,
    instance: InstanceEntry,
    kind: ReservationKind,
    size: Size,
    needed_s: float,
) -> None:
    """Promise a reservation that fits, and start what may start."""
    node = instance.node
    started = node.station.issue(kind, instance.instance_id, size, needed_s, share=instance.shares)
    assert started is not None, f"{kind} of {instance.instance_id} to {size} does not fit"
    send_started(ctx, node, started)


def send_started(ctx: EventContext, node: NodeEntry, reservations: Iterable[Reservation]) -> None:
    """Send what the station has started to the node. A lost one is told nothing any more."""
    if node.state is NodeState.LOST:
        return
    for reservation in reservations:
        instance = node.instances[reservation.instance_id]
        if reservation.kind in LOADS:
            instance.note_load_begun(begun_load_s(ctx, instance), ctx.now_s)
        command = _command(instance, reservation)
        ctx.act(SendCommand(link_id=node.link_id, command=command))


def _command(
    instance: InstanceEntry, reservation: Reservation
) -> LoadInstance | ResizeKv | UnloadInstance:
    kv_blocks = reservation.size.kv_bytes // instance.footprint.kv_block_bytes
    match reservation.kind:
        case ReservationKind.LOAD | ReservationKind.WAKE | ReservationKind.IMPORT:
            assert instance.to_load is not None
            node, size = instance.node, reservation.size
            needs_bytes = size.bytes if node.hello.loads_on_device else size.kv_bytes
            swapped_bytes = needs_bytes if node.swaps else 0
            return replace(instance.to_load, kv_blocks=kv_blocks, swapped_bytes=swapped_bytes)
        case ReservationKind.RESIZE:
            return ResizeKv(instance_id=reservation.instance_id, kv_blocks=kv_blocks)
        case ReservationKind.UNLOAD:
            return UnloadInstance(instance_id=reservation.instance_id)


def reclaim(ctx: EventContext, node: NodeEntry, instance_ids: Sequence[InstanceId]) -> None:
    """Unload idle instances of the node: their memory is wanted."""
    for instance_id in instance_ids:
        let_go(ctx, node.instances[instance_id])


def let_go(ctx: EventContext, instance: InstanceEntry) -> None:
    """Unload a loaded instance; what it holds is promised to others at once, and theirs when its
    node says that it is gone.
    """
    instance.leave()
    issue(ctx, instance, ReservationKind.UNLOAD, NOTHING, ctx.now_s)
    ctx.wake_all()
