"""The evaluation as a whole: which runs it has, beside which references; pure.

It says nothing of how a run was made, so that a table of it can be tested with known numbers.
Before: runs of cells. After: `tables`, `charts`, `record`.
"""

from collections.abc import Sequence

from mesh.domain.values import dataclass
from mesh.evaluation.cell_numbers import CellNumbers
from mesh.evaluation.series import NodeSeries
from mesh.sim.refusals import RefusalCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`met` as in `CellNumbers`; None where nothing was measured."""

    met: int | None = None
    gpu_nodes: float | None = None
    """Mean number in use."""


REQUESTS = {32: 2366, 64: 4684, 128: 9266}
"""The requests of the trace's load, by the number of functions: a cell with another number has
another load.
"""

_POLICIES = ("sllm", "sllm+cpu", "sllm+cpu+share", "llm-mesh")
_CELLS: dict[str, tuple[tuple[int, float], ...]] = {
    "3B/32": ((2204, 2.96), (2363, 0.72), (2328, 0.17), (2355, 0.04)),
    "3B/64": ((3586, 3.76), (4514, 2.67), (4585, 1.94), (4672, 1.03)),
    "3B/128": ((4357, 3.98), (6681, 3.94), (8208, 3.91), (9198, 3.08)),
    "7B/32": ((2157, 3.15), (2340, 1.46), (2349, 1.99), (2360, 0.80)),
    "7B/64": ((3333, 3.83), (4175, 3.25), (4388, 3.64), (4652, 2.56)),
    "7B/128": ((4134, 3.98), (6162, 3.95), (5918, 3.99), (7877, 3.97)),
    "13B/32": ((2055, 3.50), (2155, 3.04), (2279, 3.19), (2355, 2.42)),
    "13B/64": ((2948, 3.94), (3336, 3.84), (3044, 3.97), (3938, 3.85)),
    "13B/128": ((3332, 3.99), (3884, 3.99), (3585, 3.99), (5335, 3.99)),
}
REFERENCES: dict[tuple[str, str], Reference] = {
    (cell, policy): Reference(met=met, gpu_nodes=gpu_nodes)
    for cell, row in _CELLS.items()
    for policy, (met, gpu_nodes) in zip(_POLICIES, row, strict=True)
} | {
    ("7B/64", "llm-mesh-no-cpu"): Reference(gpu_nodes=3.50),
    ("7B/64", "llm-mesh-no-sharing"): Reference(met=4213, gpu_nodes=3.28),
    ("7B/64", "llm-mesh-no-defrag"): Reference(gpu_nodes=2.95),
    ("7B/64", "llm-mesh-no-preemption"): Reference(gpu_nodes=2.52),
}
"""By cell and policy."""


def reference(cell: str, functions: int, policy: str, requests: int) -> Reference:
    """An empty one where nothing was measured, or `requests` says that the load is another."""
    if REQUESTS.get(functions) != requests:
        return Reference()
    return REFERENCES.get((cell, policy), Reference())


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
