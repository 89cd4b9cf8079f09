"""What is simulated: the evaluation's cell 7B/128 and its load, from the generator or a trace.

Cells are larger than the testbed by whole copies of it, deployments included, and their load grows
with them for so much less time: the requests stay as many.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.deployment import Scaling
from mesh.domain.reasons import DeviceKind
from mesh.evaluation.paper.cells import COSTS, LIMITS, MEMORY_GIB, MODELS, PROCESSES
from mesh.sim.cluster import Arrival
from mesh.sim.groups import GROUP_MAX, DeploymentGroup, NodeGroup, names_of
from mesh.sim.scenario import Scenario
from mesh.sim.workload import Poisson, TraceFile, arrivals_of, drawn, from_file
from mesh_workloads.generating import LLM_MESH, Workload, generate

MODEL = "7B"
NODES = 8
"""Half of them with CPUs, half with GPUs."""
DEPLOYMENTS = 128
"""For `NODES` nodes."""
SHORT_INPUT_TOKENS, SHORT_OUTPUT_TOKENS = (16, 64), (1, 2)
SHORT_PER_S, SHORT_DEPLOYMENTS = 80.0, 16
"""Short requests, and to how many deployments, that eight nodes take without a queue worth speaking
of: each has an instance all the time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run. `short`: so many short requests, in place of the load of LLM-Mesh or of a trace."""

    nodes: int = NODES
    seed: int = 1
    trace: Path | None = None
    short: int | None = None


def scenario_of(case: Case) -> Scenario:
    copies = case.nodes // NODES
    return Scenario(
        nodes=tuple(
            NodeGroup(
                name=device.value,
                count=case.nodes // 2,
                device=device,
                memory_gib=MEMORY_GIB[device],
                processes=PROCESSES[MODEL][device],
                costs=COSTS[device],
            )
            for device in DeviceKind
        ),
        deployments=tuple(_groups((SHORT_DEPLOYMENTS if case.short else DEPLOYMENTS) * copies)),
        workload=_short(case) if case.short else _NOTHING,
        seed=case.seed,
        link_delay_s=0.001,
        ideal=True,
        limits=LIMITS,
    )


def arrivals(case: Case, scenario: Scenario) -> Iterator[Arrival]:
    """Raises InvalidInput, NotFound or StorageError for a trace that cannot be used."""
    names = [name for group in scenario.deployments for name in names_of(group)]
    if case.short:
        return drawn(_short(case), names, case.seed)
    if case.trace is not None:
        return arrivals_of(from_file(TraceFile(file=case.trace), case.seed), names)
    return arrivals_of(generate(_load(case), case.seed), names)


def _load(case: Case) -> Workload:
    copies = case.nodes / NODES
    return Workload(
        name=LLM_MESH.name,
        functions=DEPLOYMENTS * case.nodes // NODES,
        rate_per_s=LLM_MESH.rate_per_s * copies,
        duration_s=LLM_MESH.duration_s / copies,
        rates=LLM_MESH.rates,
        process=LLM_MESH.process,
        lengths=LLM_MESH.lengths,
    )


def _short(case: Case) -> Poisson:
    rate_per_s = SHORT_PER_S * case.nodes / NODES
    return Poisson(
        duration_s=(case.short or 1) / rate_per_s,
        requests_per_s=rate_per_s,
        input_tokens=SHORT_INPUT_TOKENS,
        output_tokens=SHORT_OUTPUT_TOKENS,
    )


_NOTHING = Poisson(duration_s=1.0, requests_per_s=1.0, input_tokens=(1, 1), output_tokens=(1, 1))
"""The workload of a scenario whose arrivals come from elsewhere."""


def _groups(deployments: int) -> Iterator[DeploymentGroup]:
    for first in range(0, deployments, GROUP_MAX):
        yield DeploymentGroup(
            name=f"chat-{first // GROUP_MAX}",
            count=min(GROUP_MAX, deployments - first),
            model=MODELS[MODEL],
            scaling=Scaling(keep_alive_s=1.0),
        )
