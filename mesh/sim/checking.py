"""A run under faults with everything checked: what holds of any cell must hold of this one.

It puts cell, workload, faults and invariants together, runs them to the end, and waits until the
cell has come to rest. What is broken ends the run at once. Before: `mesh sim --check`, tests, the
bench. After: `cell_checks`.
"""

from collections.abc import Callable, Iterable, Sequence

from mesh.domain.lifecycle import InstanceState
from mesh.domain.outcome import Outcome
from mesh.domain.values import dataclass
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart
from mesh.sim.cell_checks import CellChecks, check_rest
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.faults import Fault, FaultKind
from mesh.sim.injection import Injection
from mesh.sim.invariants import hold

STUCK_S = 150.0
"""From the last fault, or a later arrival, to the first token at the latest: a lease, a few waits
in a queue, and the time to compute.
"""
REST_S = 60.0
"""From the last end until nothing is under way: slow loads end by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCounts:
    """What a run had."""

    faults: tuple[tuple[str, int], ...]
    """By kind."""
    checks: tuple[tuple[str, int], ...]
    """What was checked, how often; none when nothing was."""


class FaultyRun:
    """A cell, and what goes wrong in it. `check`: hold it to the invariants."""

    def __init__(
        self,
        plan: CellPlan,
        faults: Sequence[Fault] = (),
        *,
        check: bool,
        started: Callable[[ControllerStart], Sequence[Recorder]] = lambda start: (),
    ) -> None:
        self._checks = CellChecks() if check else None
        recorders = () if self._checks is None else (self._checks,)
        self.cell = VirtualCell(plan, recorders=recorders, started=started)
        self._injection = Injection(self.cell, faults)
        last_s = max((fault.until_s for fault in faults), default=0.0)
        self._over_s = self.cell.started_s + last_s
        self.virtual_s = 0.0
        """From the start of the workload to the last end."""
        if self._checks is not None:
            self._checks.attach(self.cell)
            self._check_progress()

    def run(
        self, workload: Iterable[Arrival], told: Callable[[float], None] = lambda at_s: None
    ) -> tuple[Outcome, ...]:
        """As `VirtualCell.run`; checked, until the cell has come to rest.

        Raises RuleBroken, or what else a fault of mesh raises.
        """
        outcomes = self.cell.run(workload, told)
        self.virtual_s = self.cell.clock.now_s() - self.cell.started_s
        if self._checks is not None:
            self._come_to_rest(max(self.cell.clock.now_s(), self._over_s) + REST_S)
            check_rest(self.cell)
        return outcomes

    def _come_to_rest(self, rest_s: float) -> None:
        """Models are prefetched, and unloaded when their time is over, after the last end, too: the
        load or unload that runs then has to end.
        """
        clock, core = self.cell.clock, self.cell.core
        clock.run_until(rest_s)
        until_s = rest_s + self.cell.plan.limits.load_s_max
        while clock.now_s() < until_s and any(
            instance.state is InstanceState.UNLOADING
            or (instance.prefetched and instance.state is InstanceState.LOADING)
            for node in core.cell.nodes.values()
            for instance in node.instances.values()
        ):
            clock.run_until(clock.now_s() + 1.0)

    def counts(self) -> FaultCounts:
        checks = () if self._checks is None else sorted(self._checks.done.items())
        return FaultCounts(
            faults=tuple((k.value, n) for k in FaultKind if (n := self._injection.done[k])),
            checks=tuple(checks),
        )

    def _check_progress(self) -> None:
        """Again and again; a fault may hold requests up for as long as there are faults."""
        clock = self.cell.clock
        stuck = self.cell.callers.stuck_ids(self._over_s, STUCK_S)
        hold(not stuck, "requests are stuck: {}", stuck)
        clock.call_at(clock.now_s() + 1.0, self._check_progress)
