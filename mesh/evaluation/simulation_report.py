"""What a run of a virtual cell came to: its requests, how its nodes were used, and the report that
a live cell has, of the outcomes that its callers saw.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from mesh.domain.energy import NO_ENERGY, EnergyView
from mesh.domain.ids import NodeId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind
from mesh.domain.values import dataclass
from mesh.domain.views import CellLine, PrefetchView
from mesh.evaluation.summary import Summary
from mesh.report.calls import CallBook, CallEnd
from mesh.report.cell_report import FAULTS_MAX, LOOKS_MAX, CellReport, Looks, cell_report
from mesh.report.narrate import Narrator
from mesh.sim.cluster import CellPlan, VirtualCell
from mesh.sim.node import VirtualNode
from mesh.sim.refusals import RefusalCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """Shares of the run's virtual time."""

    node_id: NodeId
    device: DeviceKind
    used_share: float
    """With weights on it, unless costs are ideal, or busy."""
    busy_share: float
    """With requests on it, or a call under way."""
    computing_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    policy: str
    seed: int
    requests: Summary
    nodes: tuple[NodeUse, ...]
    virtual_s: float
    wall_s: float
    prefetches: PrefetchView
    """They are those of the controller that runs at the end."""
    cold_felt: int
    """The loads that callers waited for, from when on the scenario compares."""
    loaded_bytes: int
    """The weights that all loads read since then."""
    cold_felt_ratio: float | None = None
    """`cold_felt` over that of the same run without prefetch budgets, where the scenario compares
    them; `None` also where there were none.
    """
    bytes_ratio: float | None = None
    """The same of `loaded_bytes`."""
    faults: tuple[tuple[str, int], ...] = ()
    """How many of each kind there were."""
    checks: tuple[tuple[str, int], ...] = ()
    """What was checked, how often."""
    refusals: RefusalCounts | None = None
    """Where they were checked."""
    report: CellReport | None = None
    """Where a page was asked for."""
    energy: EnergyView = NO_ENERGY
    """By the books of the controller that runs at the end."""

    @property
    def tokens_per_s(self) -> float:
        """The rate of output tokens, in virtual time."""
        return self.requests.output_tokens / self.virtual_s if self.virtual_s else 0.0

    def nodes_used(self, device: DeviceKind) -> float:
        """How many nodes of a kind were in use, in the mean over time."""
        return sum(node.used_share for node in self.nodes if node.device is device)


def node_uses(nodes: Sequence[VirtualNode], virtual_s: float) -> tuple[NodeUse, ...]:
    span_s = max(virtual_s, 1e-9)
    return tuple(
        NodeUse(
            node_id=node.plan.hello.node_id,
            device=node.plan.hello.device,
            used_share=node.used_s / span_s,
            busy_share=node.busy_s / span_s,
            computing_share=node.computing_s / span_s,
        )
        for node in nodes
    )


def beside_none(report: SimulationReport, without: SimulationReport) -> SimulationReport:
    """The report, with its ratios over a run in which nothing was loaded before it was called."""
    felt, read_bytes = without.cold_felt, without.loaded_bytes
    return replace(
        report,
        cold_felt_ratio=report.cold_felt / felt if felt else None,
        bytes_ratio=report.loaded_bytes / read_bytes if read_bytes else None,
    )


class LoadCounts:
    """What a cell has loaded from a time on, in seconds after its first arrival could come."""

    def __init__(self, cell: VirtualCell, from_s: float) -> None:
        self._cell = cell
        self._before = 0, 0
        cell.clock.call_at(cell.started_s + from_s, self._begin)

    def _begin(self) -> None:
        self._before = self._all()

    def _all(self) -> tuple[int, int]:
        felt = self._cell.core.cell.prefetches.view.felt
        return felt, sum(node.engine.loaded_bytes for node in self._cell.nodes)

    def since(self) -> tuple[int, int]:
        """The loads that callers waited for, and the bytes of all."""
        (felt, read_bytes), before = self._all(), self._before
        return felt - before[0], read_bytes - before[1]


class _Lines:
    """A recorder that keeps the lines which tell of faults, each with its time."""

    def __init__(self) -> None:
        self._narrate = Narrator()
        self.said: deque[tuple[float, CellLine]] = deque(maxlen=FAULTS_MAX)

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        said = self._narrate(event, actions)
        self.said.extend((now_s, line) for line in said if line.fault)


class VirtualReport:
    """Its recorders are for a run of `duration_s` seconds."""

    def __init__(self, plan: CellPlan, duration_s: float) -> None:
        self._specs = {made.spec.name: made.spec for made in plan.deployments}
        self._book = CallBook(self._specs.get)
        self._looks = Looks(duration_s / LOOKS_MAX)
        self._lines = _Lines()
        self._cell: VirtualCell | None = None
        self.recorders = (self._book, self._lines, self._looks)

    def attach(self, cell: VirtualCell) -> None:
        self._cell = cell
        self._looks.snapshot = lambda now_s: cell.core.snapshot(now_s)

    def report(self, name: str, outcomes: Sequence[Outcome]) -> CellReport:
        """After the run."""
        assert self._cell is not None, "it was attached before the run"
        return cell_report(
            name,
            map(CallEnd.of, outcomes),
            specs=self._specs.values(),
            from_s=self._cell.started_s,
            until_s=self._cell.clock.now_s(),
            loads=self._book.loads,
            looks=self._looks.seen,
            lines=self._lines.said,
        )
