"""The report of a virtual cell: the same as a live one's, of the outcomes that its callers saw.

Before: `mesh sim --html`. After: `mesh.report.cell_report`.
"""

from collections import deque
from collections.abc import Sequence

from mesh.domain.outcome import Outcome
from mesh.domain.views import CellLine
from mesh.report.calls import CallBook, CallEnd
from mesh.report.cell_report import (
    FAULTS_MAX,
    LOOKS_MAX,
    CellReport,
    Looks,
    cell_report,
)
from mesh.report.narrate import Narrator
from mesh.sim.cluster import CellPlan, VirtualCell


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
        specs = {made.spec.name: made.spec for made in plan.deployments}
        self._book = CallBook(specs.get)
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
            from_s=self._cell.started_s,
            until_s=self._cell.clock.now_s(),
            loads=self._book.loads,
            looks=self._looks.seen,
            lines=self._lines.said,
        )
