"""The cells of LLM-Mesh's evaluation (§8.1), as plans of virtual cells, and one run of one of them.

A cell is a model and a number of functions, each of which is a deployment of that model, on four
Xeon 6462C and four A100-80GB. The load comes from a trace or from the generator that ships with
mesh. Before: `mesh bench paper`. After: `cell_numbers`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from math import ceil, inf
from pathlib import Path

from mesh.domain.deployment import Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.limits import CellLimits
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.domain.values import dataclass
from mesh.evaluation.cell_numbers import CellNumbers, cell_numbers
from mesh.evaluation.series import NodeSeries, Sampler
from mesh.sim.cell_costs import MEASURED, CellCosts
from mesh.sim.cluster import CellPlan, VirtualCell
from mesh.sim.costs import GivenCosts
from mesh.sim.groups import DeploymentGroup, NodeGroup, deployments_of, node_plans
from mesh.sim.node import NodePlan
from mesh.sim.refusals import RefusalChecks, RefusalCounts
from mesh.sim.slo_mix import with_classes, with_slos
from mesh.sim.testbed import known_model
from mesh.sim.workload import TraceFile, arrivals_of, from_file
from mesh_workloads.generating import LLM_MESH, generate
from mesh_workloads.lengths import Lengths, Quantiles
from mesh_workloads.published import AZURE_CONVERSATION, PUBLISHED
from mesh_workloads.sampling import KEPT, functions_of, load_for
from mesh_workloads.trace import Trace

MODELS = {"3B": "llama-3.2-3b", "7B": "llama-2-7b", "13B": "llama-2-13b"}
DURATION_S = 1800.0
CONTEXT_TOKENS_MAX = 4096
"""The context limit of every deployment; no request of the load is longer."""
SLO = Slo(ttft_s=2.0, ttft_tokens_per_s=512.0, tpot_s=0.25)
KEEP_ALIVE_S = {DeviceKind.CPU: 0.0, DeviceKind.GPU: 1.0}
"""An idle node counts as busy for so long (the deployments' own keep-alive is the GPU's)."""
NODES_EACH = 4
MEMORY_GIB = {DeviceKind.CPU: 256.0, DeviceKind.GPU: 78.0}
PROCESSES = {
    "3B": {DeviceKind.CPU: 4, DeviceKind.GPU: 8},
    "7B": {DeviceKind.CPU: 2, DeviceKind.GPU: 4},
    "13B": {DeviceKind.CPU: 1, DeviceKind.GPU: 2},
}
"""Engine processes that the testbed keeps on a node, by model."""
COSTS = {
    DeviceKind.CPU: GivenCosts({"load_s": 0.0, "load_bytes_per_s": inf, "unload_s": 0.0}),
    DeviceKind.GPU: GivenCosts({"load_s": 0.2, "load_bytes_per_s": 20e9, "unload_s": 0.0}),
}
"""Weights stay in the hosts' memory: a CPU computes with them where they lie, a GPU copies them.
All else costs what `CellCosts` says.
"""
MIX_SEED = 1
"""The classes that requests draw are the same under each policy."""
KV_LINK_BYTES_PER_S = 12.5e9
"""KV blocks go from node to node at 100 Gb/s, as the testbed of SLINFER is connected."""
LINK_DELAY_S = 0.001
LIMITS = CellLimits(
    batch_max=256,
    prefill_tokens_max=CONTEXT_TOKENS_MAX,
    place_retry_s=0.25,
    turn_s_max=0.05,
    delivery_s_max=0.01,
    parked_s_max=0.0,
    migrations_max=16,
)
"""A prompt is computed at once if nobody is late for it; a GPU decodes two to four times in a turn;
what is idle goes after its keep-alive.
"""

SHORT_ANSWERS = Lengths(
    name="short-answers",
    input=AZURE_CONVERSATION.input,
    output=Quantiles(shares=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0), tokens=(40, 50, 60, 70, 80, 90)),
)
"""Answers of about 65 tokens, so that an instance of a rare function has gone when it is called."""
LENGTHS = {**PUBLISHED, SHORT_ANSWERS.name: SHORT_ANSWERS}
"""The lengths of a generated load, by name."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PaperCase:
    """`model` is a key of MODELS."""

    model: str
    functions: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.functions}"


ALL_CELLS = tuple(PaperCase(model=m, functions=n) for m in MODELS for n in KEPT)


def paper_case(name: str) -> PaperCase:
    """The cell of a name such as 7B/128. Raises InvalidInput when the evaluation has no
    such cell.
    """
    for cell in ALL_CELLS:
        if cell.name == name:
            return cell
    raise InvalidInput(
        f"there is no cell {name!r}", hint=f"cells: {', '.join(c.name for c in ALL_CELLS)}"
    )


def generated(seed: int, lengths: str = AZURE_CONVERSATION.name) -> Trace:
    """The shipped load of 128 functions, with LENGTHS by that name.

    Raises InvalidInput for lengths that hardly ever fit into the context.
    """
    name = LLM_MESH.name if lengths == AZURE_CONVERSATION.name else f"{LLM_MESH.name}, {lengths}"
    drawn = replace(LENGTHS[lengths], context_tokens_max=CONTEXT_TOKENS_MAX)
    return generate(replace(LLM_MESH, name=name, lengths=drawn), seed)


def from_trace(path: Path, seed: int) -> Trace:
    """The first half hour of a file: of a plain one as its 128 functions are numbered, of others
    128 are sampled, and what the file lacks is drawn.

    Raises InvalidInput, NotFound or StorageError for a trace that cannot be had.
    """
    whole = TraceFile(file=path, functions=max(KEPT), duration_s=DURATION_S)
    return replace(from_file(whole, seed), name=path.stem)


def load(trace: Trace, functions: int, duration_s: float) -> Trace:
    """The cell's arrivals of the first `duration_s` of a trace of 128 functions.

    Raises InvalidInput when there are none.
    """
    kept = load_for(trace, functions)
    arrivals = tuple(takewhile(lambda a: a.t_s < duration_s, kept.arrivals))
    if not arrivals:
        raise InvalidInput(f"trace {kept.name} has no arrivals in its first {duration_s:g} s")
    return replace(kept, arrivals=arrivals, duration_s=duration_s)


def plan(cell: PaperCase, policy: str, costs: CellCosts = MEASURED, slo_mix: str = "") -> CellPlan:
    """Raises InvalidInput for a policy that there is not, or a mix that is none."""
    profiles = (table.profile for table in known_model(MODELS[cell.model]).costs.values())
    return CellPlan(
        nodes=tuple(node for device in DeviceKind for node in _nodes(cell, device, costs)),
        deployments=tuple(
            with_classes(made, slo_mix) if slo_mix else made
            for function in functions_of(cell.functions)
            for made in deployments_of(_deployment(cell, function), costs)
        ),
        profiles=tuple(profiles),
        policy=policy,
        limits=LIMITS,
        link_delay_s=LINK_DELAY_S,
        lengths_told=costs.lengths_told,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRun:
    """What a cell came to under a policy."""

    cell: PaperCase
    policy: str
    numbers: CellNumbers
    nodes: tuple[NodeSeries, ...]
    refusals: RefusalCounts | None = None
    """Where they were checked."""


def run(
    cell: PaperCase,
    policy: str,
    work: Trace,
    *,
    costs: CellCosts = MEASURED,
    check_refusals: bool = False,
    slo_mix: str = "",
    told: Callable[[float], None] = lambda at_s: None,
) -> PaperRun:
    """`work` is what `load` made for the cell; `told` hears the time of each arrival. With a mix
    (`mesh.sim.slo_mix`) each request draws its class, and is measured by that.
    """
    checks = RefusalChecks() if check_refusals else None
    made = plan(cell, policy, costs, slo_mix)
    virtual = VirtualCell(made, recorders=() if checks is None else (checks,))
    if checks is not None:
        checks.attach(virtual)
    sampler = Sampler(virtual, ceil(work.duration_s))
    functions = functions_of(cell.functions)
    names = [_name(function) for function in functions]
    arrivals = arrivals_of(work, names, functions=functions)
    if slo_mix:
        arrivals = with_slos(arrivals, made.deployments, slo_mix, MIX_SEED)
    ended = virtual.run(arrivals, told)
    outcomes = ended if slo_mix else tuple([replace(outcome, slo=SLO) for outcome in ended])
    virtual.clock.run_until(sampler.ends_s)
    nodes = sampler.series()
    return PaperRun(
        cell=cell,
        policy=policy,
        numbers=cell_numbers(
            outcomes, nodes, virtual.core.cell.energy, [of.spec for of in made.deployments]
        ),
        nodes=nodes,
        refusals=None if checks is None else checks.counts(outcomes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperJob:
    """A run to be made (`mesh.evaluation.runs.Job`)."""

    cell: PaperCase
    policy: str
    work: Trace
    costs: CellCosts = MEASURED
    check_refusals: bool = False
    slo_mix: str = ""

    @property
    def name(self) -> str:
        return f"{self.cell.name} {self.policy}"

    @property
    def weight(self) -> float:
        return len(self.work.arrivals)

    def compute(self) -> PaperRun:
        return run(
            self.cell,
            self.policy,
            self.work,
            costs=self.costs,
            check_refusals=self.check_refusals,
            slo_mix=self.slo_mix,
        )


def _name(function: int) -> str:
    return f"function-{function:03d}"


def _nodes(cell: PaperCase, device: DeviceKind, costs: CellCosts) -> Iterator[NodePlan]:
    group = NodeGroup(
        name=device.value,
        count=NODES_EACH,
        device=device,
        memory_gib=MEMORY_GIB[device],
        processes=PROCESSES[cell.model][device],
        kv_link_bytes_per_s=KV_LINK_BYTES_PER_S,
        costs=COSTS[device],
    )
    for node in node_plans(group, LIMITS, costs):
        yield replace(node, kept_s=KEEP_ALIVE_S[device])


def _deployment(cell: PaperCase, function: int) -> DeploymentGroup:
    return DeploymentGroup(
        name=_name(function),
        model=MODELS[cell.model],
        context_tokens_max=CONTEXT_TOKENS_MAX,
        slo=SLO,
        scaling=Scaling(replicas_max=2 * NODES_EACH, keep_alive_s=max(KEEP_ALIVE_S.values())),
    )
