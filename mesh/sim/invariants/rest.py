"""What holds of a cell that has come to rest: once all faults are over and all requests have ended.

Before: whoever runs a cell to its end. After: nothing; a rule that is broken raises.
"""

from collections.abc import Mapping

from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.ids import NodeId
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.sim.invariants.rule import hold
from mesh.sim.virtual_engine import VirtualEngine

RESTS = (InstanceState.READY, InstanceState.PARKED)


def check_rest(cell: Cell, engines: Mapping[NodeId, VirtualEngine]) -> None:
    """Nothing is left under way, and each node's engine has what the books say; all nodes joined
    again.
    """
    hold(not cell.requests, "requests are stuck: {}", list(cell.requests))
    hold(not cell.operations, "operations are stuck: {}", list(cell.operations))
    hold(set(cell.nodes) == set(engines), "{} of {} are in", set(cell.nodes), set(engines))
    for name, node in cell.nodes.items():
        _check_idle(node, engines[name])


def _check_idle(node: NodeEntry, engine: VirtualEngine) -> None:
    station, name = node.station, node.node_id
    under_way = (*station.running_reservations(), *station.waiting())
    hold(node.state is NodeState.READY, "{} is {}", name, node.state)
    hold(not under_way, "{}: reservations are stuck: {}", name, under_way)
    promised, tracked = station.promised_bytes, station.tracked_bytes
    hold(promised == tracked, "{}: {} B promised, {} B tracked", name, promised, tracked)
    hold(not engine.has_requests(), "{} computes for nobody", name)
    found = {memory.instance_id: memory for memory in engine.memory()}
    known = set(node.instances)
    hold(set(found) == known, "{} has {}, not {}", name, set(found), known)
    for instance_id, instance in node.instances.items():
        hold(instance.state in RESTS, "{} is {} for ever", instance_id, instance.state)
        hold(not instance.profiling, "{} is kept for a profile for ever", instance_id)
        blocks, real = instance.kv_blocks, found[instance_id].kv_blocks
        hold(blocks == real, "{} has {} KV blocks, not {}", instance_id, real, blocks)
        promised_blocks = instance.promised_blocks
        kept = blocks == promised_blocks >= 1
        hold(kept, "{} has {} KV blocks, {} promised", instance_id, blocks, promised_blocks)
        used = instance.kv_blocks_used
        hold(not used, "{} uses {} KV blocks for nobody", instance_id, used)
