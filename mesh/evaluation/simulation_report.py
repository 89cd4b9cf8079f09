"""What a run of a virtual cell came to: its requests, and how its nodes were used."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mesh.domain.ids import NodeId
from mesh.domain.reasons import DeviceKind
from mesh.domain.views import PrefetchView
from mesh.evaluation.summary import Summary
from mesh.report.cell_report import CellReport
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
    loaded_bytes: int
    """The weights that all loads read."""
    cold_felt_ratio: float | None = None
    """The loads that callers waited for, over those of the same run without a prefetch budget,
    where the scenario asks for it; `None` also where there were none.
    """
    bytes_ratio: float | None = None
    """The bytes that all loads read, over the same."""
    faults: tuple[tuple[str, int], ...] = ()
    """How many of each kind there were."""
    checks: tuple[tuple[str, int], ...] = ()
    """What was checked, how often."""
    refusals: RefusalCounts | None = None
    """Where they were checked."""
    report: CellReport | None = None
    """Where a page was asked for."""

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
    felt, read_bytes = without.prefetches.felt, without.loaded_bytes
    return replace(
        report,
        cold_felt_ratio=report.prefetches.felt / felt if felt else None,
        bytes_ratio=report.loaded_bytes / read_bytes if read_bytes else None,
    )
