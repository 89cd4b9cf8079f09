"""The controller's books of memory, added up anew and held against what engines have."""

from mesh.core.cell import Cell, InstanceEntry, NodeEntry
from mesh.domain.lifecycle import InstanceState
from mesh.memory.station import OVERTAKEN_MAX, MemoryOperation, MemoryOperationKind
from tests.core.world.engine import WorldEngine


def check_books(node: NodeEntry) -> None:
    """All of it added up anew."""
    station = node.station
    holdings = station._holdings  # the books as they are kept
    assert set(holdings) == set(node.instances)
    assert station.promised_bytes == sum(h.promised_bytes for h in holdings.values())
    assert station.tracked_bytes == sum(h.tracked_bytes for h in holdings.values())
    assert station.promised_bytes + station.free_bytes == station.capacity_bytes
    assert station.tracked_bytes <= station.capacity_bytes
    assert all(h.overtaken <= OVERTAKEN_MAX for h in holdings.values())
    waiting = {operation.instance_id for operation in station.waiting()}
    for instance_id, instance in node.instances.items():
        _check_instance(instance, station.running(instance_id), instance_id in waiting)


def _check_instance(instance: InstanceEntry, running: MemoryOperation | None, waits: bool) -> None:
    """Its state and its operations say the same."""
    held = list(instance.requests.values())
    assert instance.required_blocks == sum(h.required_blocks for h in held)
    match instance.state:
        case InstanceState.LOADING:
            assert waits or (running and running.kind is MemoryOperationKind.LOAD)
        case InstanceState.PARKED:
            assert not held
        case InstanceState.READY | InstanceState.DRAINING:
            assert not running or running.kind is MemoryOperationKind.RESIZE
        case _:
            pass  # it broke, or its load has ended although it was given up
    for request in held:
        tokens = min(request.tokens, instance.context_tokens_max)
        assert request.required_blocks >= instance.footprint.blocks_for(tokens)


def check_engine(cell: Cell, link_id: int | None, engine: WorldEngine) -> None:
    """What an engine has of the instances that are in the books is no more than what is tracked,
    and nobody's blocks are taken away.
    """
    node = cell.links.get(link_id) if link_id is not None else None
    for held in engine.memory():
        assert held.kv_blocks_used <= held.kv_blocks
        if node is not None and held.instance_id in node.instances:
            tracked = node.station._holdings[held.instance_id].tracked_bytes
            assert held.weights_bytes + held.kv_held_bytes <= tracked
