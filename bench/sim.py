"""Times the simulator: half an hour of 128 deployments on eight nodes; how time and memory grow.

The load is the generator's, with the figures of LLM-Mesh's own; `--trace FILE` takes the arrivals
from a file. `--growth` simulates larger cells as well (the same load on each eight nodes, so many
times shorter), and then more and more short requests on eight nodes. The last line is one JSON
object: `seconds`, `cpu_seconds`, `rss_mb`, `requests`, `tokens`, `decisions_per_s`; with `--growth`
also `request_us` (of CPU time) and `rss_mb` by nodes and by requests, and `growth`: its rows.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

from bench.harness import Report, Table, show_status
from mesh.domain.deployment import Scaling
from mesh.domain.errors import InvalidInput
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind
from mesh.evaluation.paper.cells import COSTS, LIMITS, MEMORY_GIB, MODELS, PROCESSES
from mesh.sim.cluster import VirtualCell
from mesh.sim.groups import GROUP_MAX, DeploymentGroup, NodeGroup
from mesh.sim.scenario import Scenario, arrivals, plan
from mesh.sim.workload import Poisson, Serverless, TraceFile, WorkloadKind
from mesh_workloads.generating import LLM_MESH

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
        workload=_load(case),
        seed=case.seed,
        link_delay_s=0.001,
        ideal=True,
        limits=LIMITS,
    )


def _load(case: Case) -> WorkloadKind:
    if case.short:
        return _short(case)
    if case.trace is not None:
        return TraceFile(file=case.trace)
    return Serverless(duration_s=LLM_MESH.duration_s * NODES / case.nodes)


def _short(case: Case) -> Poisson:
    rate_per_s = SHORT_PER_S * case.nodes / NODES
    return Poisson(
        duration_s=(case.short or 1) / rate_per_s,
        requests_per_s=rate_per_s,
        input_tokens=SHORT_INPUT_TOKENS,
        output_tokens=SHORT_OUTPUT_TOKENS,
    )


def _groups(deployments: int) -> Iterator[DeploymentGroup]:
    for first in range(0, deployments, GROUP_MAX):
        yield DeploymentGroup(
            name=f"chat-{first // GROUP_MAX}",
            count=min(GROUP_MAX, deployments - first),
            model=MODELS[MODEL],
            scaling=Scaling(keep_alive_s=1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    requests: int
    finished: int
    tokens: int
    decisions: int
    """The decisions of the controller."""
    virtual_s: float
    seconds: float
    """From the making of the cell to the end of its last request."""
    cpu_seconds: float
    """The same without what else the machine did."""
    rss_mb: float
    """The most memory of the whole process, in MB of 10^6 bytes."""

    @property
    def request_us(self) -> float:
        """The CPU time that a request takes."""
        return 1e6 * self.cpu_seconds / self.requests

    @property
    def decisions_per_s(self) -> float:
        return self.decisions / self.seconds


class _Counter:
    """A recorder that counts decisions, and outcomes: a million of them are not kept."""

    def __init__(self) -> None:
        self.decisions = self.requests = self.finished = self.tokens = 0

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        self.decisions += 1

    def ended(self, outcome: Outcome) -> None:
        self.requests += 1
        self.finished += outcome.finished
        self.tokens += len(outcome.tokens_s)


def measure(case: Case) -> Measured:
    """Raises the case's errors."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(_measure, case).result()


def _measure(case: Case) -> Measured:
    scenario, counter = scenario_of(case), _Counter()
    coming = arrivals(scenario)
    began_s, computed_s = time.perf_counter(), time.process_time()
    cell = VirtualCell(plan(scenario), recorders=(counter,), ended=counter.ended)
    cell.run(coming)
    seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - computed_s
    return Measured(
        requests=counter.requests,
        finished=counter.finished,
        tokens=counter.tokens,
        decisions=counter.decisions,
        virtual_s=cell.clock.now_s() - cell.started_s,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    )


SECONDS_MAX, RSS_MB_MAX = 20.0, 500.0
GROWTH_NODES = (80, 1000)
GROWTH_REQUESTS = (10_000, 100_000, 1_000_000)


def figures(measured: list[tuple[str, Case, Measured]]) -> dict[str, object]:
    first = measured[0][2]
    found: dict[str, object] = {
        "seconds": round(first.seconds, 2),
        "cpu_seconds": round(first.cpu_seconds, 2),
        "rss_mb": round(first.rss_mb, 1),
        "requests": first.requests,
        "tokens": first.tokens,
        "decisions_per_s": round(first.decisions_per_s),
    }
    for kind in ("nodes", "requests"):
        of = [(case.short or case.nodes, m) for grown, case, m in measured if grown == kind]
        if of:
            of = [(NODES, first), *of] if kind == "nodes" else of
            found[f"request_us_by_{kind}"] = {str(n): round(m.request_us, 1) for n, m in of}
            found[f"rss_mb_by_{kind}"] = {str(n): round(m.rss_mb, 1) for n, m in of}
    if len(measured) > 1:
        found["growth"] = [row(case, m) for _, case, m in measured]
    return found


def row(case: Case, found: Measured) -> dict[str, float]:
    return {
        "nodes": case.nodes,
        "short": case.short is not None,
        "requests": found.requests,
        "finished": found.finished,
        "tokens": found.tokens,
        "seconds": round(found.seconds, 2),
        "cpu_seconds": round(found.cpu_seconds, 2),
        "request_us": round(found.request_us, 1),
        "decisions_per_s": round(found.decisions_per_s),
        "rss_mb": round(found.rss_mb, 1),
    }


def run(
    *,
    trace: Path | None = None,
    seed: int = 1,
    growth: Annotated[bool, "larger cells and more requests as well"] = False,
    nodes: Annotated[tuple[int, ...], "of the larger cells"] = GROWTH_NODES,
    requests: Annotated[tuple[int, ...], "short requests"] = GROWTH_REQUESTS,
) -> Report:
    if any(count % NODES for count in nodes):
        raise InvalidInput(f"cells grow by {NODES} nodes: give --nodes multiples of {NODES}")
    cases = [("", Case(seed=seed, trace=trace))]
    if growth:
        cases += [("nodes", Case(seed=seed, nodes=count)) for count in nodes]
        cases += [("requests", Case(seed=seed, short=count)) for count in requests]
    measured = []
    for kind, case in cases:
        load = f"{case.short:,} short requests" if case.short else "the load"
        show_status(f"{load} on {case.nodes} nodes")
        measured.append((kind, case, measure(case)))
    first = measured[0][2]
    told = (
        f"{first.virtual_s / 60:.0f} minutes in {first.seconds:.1f} s (≤ {SECONDS_MAX:.0f}) and "
        f"{first.rss_mb:.0f} MB (≤ {RSS_MB_MAX:.0f})"
    )
    rows = [row(case, m) for _, case, m in measured]
    table = Table(
        headings=[name.replace("_", " ") for name in rows[0]],
        rows=[["short" if v is True else f"{v:,}" if v else "" for v in r.values()] for r in rows],
    )
    return Report(figures=figures(measured), shown=(table, told))
