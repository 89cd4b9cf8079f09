"""What the charts of a cell show of its nodes and instances, in sums and means. Pure."""

from collections.abc import Sequence
from statistics import fmean

from mesh.domain.lifecycle import NodeState
from mesh.domain.recent import CellGauges
from mesh.domain.views import NodeSnapshot
from mesh.report.memory_parts import parts


def gauges(nodes: Sequence[NodeSnapshot]) -> CellGauges:
    """The gauges of these nodes together."""
    instances = [instance for node in nodes for instance in node.instances]
    busy = [i for i in instances if i.batch and i.iteration_s]
    headrooms = [i.headroom_least_s for i in instances if i.headroom_least_s is not None]
    sizes: dict[str, int] = {}
    for node in nodes:
        for part in parts(node):
            sizes[part.name] = sizes.get(part.name, 0) + part.size_bytes
    return CellGauges(
        nodes_ready=sum(node.state is NodeState.READY for node in nodes),
        nodes_used=sum(bool(node.instances) for node in nodes),
        headroom_least_s=min(headrooms, default=None),
        iteration_s=fmean(i.iteration_s for i in busy) if busy else None,
        iteration_measured_s=fmean(i.iteration_s * i.correction for i in busy) if busy else None,
        base_bytes=sizes.get("base"),
        weights_bytes=sizes.get("weights"),
        kv_used_bytes=sizes.get("KV"),
        kv_cached_bytes=sizes.get("cached"),
        kv_idle_bytes=sizes.get("idle"),
        in_flight_bytes=sizes.get("in flight"),
        free_bytes=sizes.get("free"),
    )
