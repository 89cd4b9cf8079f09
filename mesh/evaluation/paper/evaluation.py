"""The evaluation as a whole: which runs it has, beside which references; pure.

It says nothing of how a run was made, so that a table of it can be tested with known numbers.
Before: runs of cells. After: `tables`, `charts`, `record`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.evaluation.cell_numbers import CellNumbers
from mesh.evaluation.paper.reference import Reference
from mesh.evaluation.series import NodeSeries
from mesh.sim.refusals import RefusalCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRun:
    """One cell under one policy."""

    cell: str
    policy: str
    numbers: CellNumbers
    reference: Reference
    """Empty for a load that nobody else has measured."""
    nodes: tuple[NodeSeries, ...]
    seconds: float
    """The wall time that the run took."""
    refusals: RefusalCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Runs in the order of cells, then policies."""

    workload: str
    """What the load is, in words."""
    duration_s: float
    runs: tuple[EvaluatedRun, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.cell for run in self.runs))

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    def of_cell(self, cell: str) -> list[EvaluatedRun]:
        return [run for run in self.runs if run.cell == cell]

    def run(self, cell: str, policy: str) -> EvaluatedRun | None:
        return next((r for r in self.runs if (r.cell, r.policy) == (cell, policy)), None)


def is_ablation(policy: str) -> bool:
    """Whether it is NAME-no-PART: a policy with a part taken away."""
    return "-no-" in policy


def ratio(ours: float, theirs: float | None) -> float | None:
    """None where there is nothing to divide by."""
    return ours / theirs if theirs else None


def ablated(runs: Sequence[EvaluatedRun]) -> list[tuple[EvaluatedRun, EvaluatedRun]]:
    """Runs of a policy NAME-no-PART, each beside the run of NAME in its cell where there is one."""
    whole = {(run.cell, run.policy): run for run in runs}
    found = []
    for run in runs:
        name = run.policy.partition("-no-")[0]
        if is_ablation(run.policy) and (run.cell, name) in whole:
            found.append((run, whole[run.cell, name]))
    return found
