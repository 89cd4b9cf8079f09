"""What a node's memory is divided into, for the bars of `mesh top` and of the page.

Pure: a view of a node in, its parts out. Both draw what is found here, so that they agree, and the
charts of a cell draw their sums (`gauges`).
"""

from collections.abc import Sequence
from statistics import fmean

from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.recent import CellGauges
from mesh.domain.values import dataclass
from mesh.domain.views import InstanceSnapshot, NodeSnapshot
from mesh.runtime.turns import Steps


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a node's memory: its letter in the bar, its colour there, its name below."""

    letter: str
    style: str
    name: str
    size_bytes: int


def parts(node: NodeSnapshot) -> tuple[Part, ...]:
    """The node's limit, divided: what is in flight is promised or tracked, and not yet, or no more,
    in a loaded instance. More than the limit in all on a node that holds more than that.
    """
    loaded = [i for i in node.instances if i.state is not InstanceState.LOADING]
    weights_bytes = sum(instance.weights_bytes for instance in loaded)
    kv_bytes = sum(instance.kv_bytes for instance in loaded)
    used_bytes = min(sum(instance.kv_used_bytes for instance in loaded), kv_bytes)
    cached_bytes = sum(instance.kv_cached_bytes for instance in loaded)
    # Within sizes in force first; beyond them in what nobody has been promised.
    within_bytes = min(cached_bytes, kv_bytes - used_bytes)
    booked_bytes = max(node.promised_bytes, node.tracked_bytes, weights_bytes + kv_bytes)
    free = max(node.memory_bytes - node.base_bytes - booked_bytes, 0)
    beyond_bytes = min(cached_bytes - within_bytes, free)
    return (
        Part("B", "blue", "base", node.base_bytes),
        Part("W", "magenta", "weights", weights_bytes),
        Part("K", "green", "KV", used_bytes),
        Part("c", "cyan", "cached", within_bytes + beyond_bytes),
        Part("k", "yellow", "idle", kv_bytes - used_bytes - within_bytes),
        Part(">", "red", "in flight", booked_bytes - weights_bytes - kv_bytes),
        Part(".", "dim", "free", free - beyond_bytes),
    )


def free_bytes(node: NodeSnapshot) -> int:
    """What can still be promised; negative on a node that holds more than its limit."""
    return node.memory_bytes - node.base_bytes - node.promised_bytes


def gauges(nodes: Sequence[NodeSnapshot]) -> Steps[CellGauges]:
    """The gauges of these nodes together, a node a step."""
    busy: list[InstanceSnapshot] = []
    headrooms: list[float] = []
    sizes: dict[str, int] = {}
    for node in nodes:
        busy += [i for i in node.instances if i.batch and i.iteration_s]
        headrooms += [i.headroom_least_s for i in node.instances if i.headroom_least_s is not None]
        for part in parts(node):
            sizes[part.name] = sizes.get(part.name, 0) + part.size_bytes
        yield
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
