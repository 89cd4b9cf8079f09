"""What a node did in each second of a run, and what follows from it over all nodes.

A series has one value for each whole second of a workload's time: a share or a count is of that
second, a level is as it stood at its end. A `Sampler` looks at every node of a virtual cell once a
virtual second; counters are read as differences, so that a second's share of use is exact. Before:
`cluster`, whose clock wakes it. After: `cell_numbers`, the charts.
"""

from collections.abc import Sequence
from statistics import fmean

from mesh.domain.ids import NodeId
from mesh.domain.reasons import DeviceKind
from mesh.domain.values import dataclass
from mesh.sim.cluster import VirtualCell
from mesh.sim.node import VirtualNode


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


SECOND_S = 1.0
SECONDS_MAX = 86_400
"""The longest recording: a day."""


class _Seen:
    """What was seen of one node so far: a row of a `NodeSeries` each second."""

    def __init__(self, node: VirtualNode) -> None:
        self.node = node
        self._rows: list[tuple[float, float, float, int, int, int, int, int]] = []
        self.set_out()

    def set_out(self) -> None:
        """What the counters are from now on compared with."""
        node, engine = self.node, self.node.engine
        tokens, loads = engine.decoded_tokens, engine.loads
        self._before = node.used_s, node.busy_s, node.computing_s, tokens, loads

    def look(self) -> None:
        node, engine = self.node, self.node.engine
        used_s, busy_s, computing_s, decoded_tokens, loads = self._before
        memory = engine.memory()
        self._rows.append(
            (
                node.used_s - used_s,
                node.busy_s - busy_s,
                node.computing_s - computing_s,
                engine.decoded_tokens - decoded_tokens,
                sum(m.weights_bytes for m in memory),
                sum(m.kv_held_bytes for m in memory),
                engine.requests(),
                engine.loads - loads,
            )
        )
        self.set_out()

    def series(self) -> NodeSeries:
        hello = self.node.plan.hello
        used, busy, computing, decoded, weights, kv, requests, loads = zip(*self._rows, strict=True)
        return NodeSeries(
            node_id=hello.node_id,
            device=hello.device,
            memory_bytes=hello.memory_bytes,
            used=used,
            busy=busy,
            computing=computing,
            decoded_tokens=decoded,
            weights_bytes=weights,
            kv_held_bytes=kv,
            requests=requests,
            loads=loads,
        )


class Sampler:
    """Looks `seconds` times, the first time a second after it was made."""

    def __init__(self, cell: VirtualCell, seconds: int) -> None:
        assert 0 < seconds <= SECONDS_MAX
        self._clock = cell.clock
        self._begun_s = cell.clock.now_s()
        self._seconds = seconds
        self._looks = 0
        self._seen = [_Seen(node) for node in cell.nodes]
        for seen in self._seen:
            seen.node.look(self._begun_s)
            seen.set_out()
        self._wait()

    @property
    def ends_s(self) -> float:
        """On the cell's clock."""
        return self._begun_s + self._seconds * SECOND_S

    def series(self) -> tuple[NodeSeries, ...]:
        return tuple(seen.series() for seen in self._seen)

    def _wait(self) -> None:
        self._clock.call_at(self._begun_s + (self._looks + 1) * SECOND_S, self._look)

    def _look(self) -> None:
        self._looks += 1
        for seen in self._seen:
            seen.node.look(self._clock.now_s())
            seen.look()
        if self._looks < self._seconds:
            self._wait()
