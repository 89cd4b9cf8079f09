"""What a node did in each second of a run, and what follows from it over all nodes; pure.

A series has one value for each whole second of a workload's time: a share or a count is of that
second, a level is as it stood at its end. Before: `sampling`. After: `cell_numbers`, the charts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from mesh.domain.ids import NodeId
from mesh.domain.reasons import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeries:
    """What one node did, second by second. All tuples have the same length."""

    node_id: NodeId
    device: DeviceKind
    memory_bytes: int
    used: tuple[float, ...]
    """Share of the second in which the node was in use, which it is whenever it is busy."""
    busy: tuple[float, ...]
    """Share in which it had requests, a call under way, or its keep-alive after them."""
    computing: tuple[float, ...]
    """Seconds of the iterations that began in the second; one may be longer than that."""
    decoded_tokens: tuple[int, ...]
    weights_bytes: tuple[int, ...]
    kv_held_bytes: tuple[int, ...]
    requests: tuple[int, ...]
    loads: tuple[int, ...]


def nodes_in_use(nodes: Sequence[NodeSeries], device: DeviceKind) -> tuple[float, ...]:
    """How many nodes of a kind were in use, by second."""
    return summed([node.used for node in nodes if node.device is device])


def nodes_busy(nodes: Sequence[NodeSeries], device: DeviceKind) -> tuple[float, ...]:
    """How many nodes of a kind were busy, by second."""
    return summed([node.busy for node in nodes if node.device is device])


def summed(series: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(values) for values in zip(*series, strict=True))


def binned(values: Sequence[float], bins_max: int) -> list[tuple[float, float]]:
    """(second, mean) of at most so many stretches of equal length; the last may be shorter."""
    if not values:
        return []
    width = -(-len(values) // bins_max)
    return [
        (float(begin), fmean(values[begin : begin + width]))
        for begin in range(0, len(values), width)
    ]
