"""Looks at every node of a virtual cell once a virtual second, and keeps what it saw.

Counters are read as differences, so that a second's share of use is exact, not a sample. Before:
`cluster`, whose clock it is woken by. After: `mesh.evaluation.series`.
"""

from dataclasses import dataclass, field

from mesh.evaluation.series import NodeSeries
from mesh.sim.cluster import VirtualCell
from mesh.sim.node import VirtualNode

SECOND_S = 1.0
SECONDS_MAX = 86_400
"""Of one recording: a day."""


@dataclass(slots=True)
class _Seen:
    """Of one node so far. The counters are their values at the last look."""

    node: VirtualNode
    used_s: float = 0.0
    computing_s: float = 0.0
    decoded_tokens: int = 0
    loads: int = 0
    used: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    weights_bytes: list[int] = field(default_factory=list)
    kv_held_bytes: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    def set_out(self) -> None:
        self.used_s, self.computing_s = self.node.used_s, self.node.computing_s
        self.decoded_tokens = self.node.engine.decoded_tokens
        self.loads = self.node.engine.loads

    def look(self) -> None:
        node, engine = self.node, self.node.engine
        memory = engine.memory()
        self.used.append(node.used_s - self.used_s)
        self.computing.append(node.computing_s - self.computing_s)
        self.decoded.append(engine.decoded_tokens - self.decoded_tokens)
        self.loaded.append(engine.loads - self.loads)
        self.weights_bytes.append(sum(m.weights_bytes for m in memory))
        self.kv_held_bytes.append(sum(m.kv_held_bytes for m in memory))
        self.requests.append(engine.requests())
        self.set_out()

    def series(self) -> NodeSeries:
        hello = self.node.plan.hello
        return NodeSeries(
            node_id=hello.node_id,
            device=hello.device,
            memory_bytes=hello.memory_bytes,
            used=tuple(self.used),
            computing=tuple(self.computing),
            decoded_tokens=tuple(self.decoded),
            weights_bytes=tuple(self.weights_bytes),
            kv_held_bytes=tuple(self.kv_held_bytes),
            requests=tuple(self.requests),
            loads=tuple(self.loaded),
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
