"""What a load does to who computes beside it, and to a wake: a cell of one CPU node.

Models of the demo model's shape, each with weights of its own, are called from zero, their loads
imports of what was compiled before: first beside a neighbour that decodes for several callers
without a pause, then beside wakes, loads that take the weights of an instance that is there. By the
journal of the node. The last line is one JSON object: `neighbour_slowdown` is the mean of an
iteration within a load over one beside none, `wake_beside_load_ratio` the median of wakes. Exit
code 1 when a target was missed.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Annotated

from bench.cells import local_cell, wait_calm, wait_until
from bench.harness import Report, Table, rounded, show_status
from bench.own_models import own_source, plant_models
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceLoaded, LoadInstance
from mesh.domain.node_events import StepFinished
from mesh.domain.slo import Slo
from mesh.domain.steps import LoadTier
from mesh.evaluation.load_client import Call, offer
from mesh.runtime.journal import Decision, read_journal
from mesh.wire.client import MeshClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """From the order to the end; a wake is one from the host's memory."""

    deployment: DeploymentName
    tier: LoadTier
    begin_s: float
    end_s: float

    @property
    def elapsed_s(self) -> float:
        return self.end_s - self.begin_s

    def meets(self, begin_s: float, end_s: float) -> bool:
        return begin_s < self.end_s and self.begin_s < end_s


@dataclass(slots=True)
class Iterations:
    """Seconds of the neighbour's decodes."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)


def loads_of(decisions: Iterable[Decision]) -> list[Load]:
    """Those that ended well, in the order of their ends."""
    begun: dict[InstanceId, tuple[DeploymentName, float]] = {}
    found = []
    for decision in decisions:
        if isinstance(decision.event, InstanceLoaded) and decision.event.instance_id in begun:
            deployment, begin_s = begun.pop(decision.event.instance_id)
            tier = decision.event.tier
            found.append(
                Load(deployment=deployment, tier=tier, begin_s=begin_s, end_s=decision.now_s)
            )
        for action in decision.actions:
            if isinstance(action, LoadInstance):
                begun[action.instance_id] = action.deployment, decision.now_s
    return found


def iterations_of(
    decisions: Iterable[Decision], neighbour: InstanceId, batch: int, loads: Sequence[Load]
) -> Iterations:
    """Decodes of a full batch: those that lie wholly within a load, and those that meet none."""
    found = Iterations()
    for begin_s, end_s, elapsed_s in _decodes(decisions, neighbour, batch):
        met = [load for load in loads if load.meets(begin_s, end_s)]
        if not met:
            found.alone_s.append(elapsed_s)
        elif any(load.begin_s <= begin_s and end_s <= load.end_s for load in met):
            found.beside_s.append(elapsed_s)
    return found


def wakes_of(loads: Sequence[Load]) -> tuple[list[float], list[float]]:
    """Seconds of wakes that met no load from the disk, and of those that met one."""
    wakes = [load for load in loads if load.tier is LoadTier.HOST]
    others = [load for load in loads if load.tier is not LoadTier.HOST]
    met = [any(load.meets(wake.begin_s, wake.end_s) for load in others) for wake in wakes]
    alone = [wake.elapsed_s for wake, meets in zip(wakes, met, strict=True) if not meets]
    return alone, [wake.elapsed_s for wake, meets in zip(wakes, met, strict=True) if meets]


def _decodes(
    decisions: Iterable[Decision], neighbour: InstanceId, batch: int
) -> Iterator[tuple[float, float, float]]:
    """Begin and end of a turn, and the seconds of one of its iterations."""
    for decision in decisions:
        match decision.event:
            case StepFinished(instance_id=i, result=result) if i == neighbour:
                if result.decode_batch == batch and not result.prefill_tokens:
                    begin_s = decision.now_s - result.elapsed_s
                    yield begin_s, decision.now_s, result.elapsed_s / result.iterations
            case _:
                pass


LOADS, QUICK_LOADS = 8, 3
"""Beside the neighbour, and as many beside wakes."""
CALLERS = 4
CONTEXT_TOKENS = 1024
PROMPT = tuple(range(100, 127))
FIRST_LOAD_S = 2.0
"""After the neighbour's callers: by then it only decodes."""
APART_S = 1.5
"""From one load to the next: half of it without one."""
WAKE_AFTER_S = 0.02
"""Behind the call whose load it is to meet."""
BLOB_S_MAX, CALL_S_MAX = 120.0, 120.0
SLO = Slo(ttft_s=300.0, tpot_s=10.0)
"""Everybody is in time: what is measured is how long it takes."""
NEIGHBOUR, SHARED = DeploymentName("neighbour"), DeploymentName("shared")


def call(name: DeploymentName, at_s: float = 0.0, output_tokens: int = 1) -> Call:
    return Call(
        at_s=at_s, deployment=name, slo=SLO, prompt_tokens=PROMPT, output_tokens=output_tokens
    )


def named(what: str, count: int) -> list[DeploymentName]:
    return [DeploymentName(f"{what}-{number:02}") for number in range(count)]


class Scene:
    """The deployments of a cell, called as wanted. Raises MeshError where a call is not served."""

    def __init__(self, cell: LocalCell, client: MeshClient) -> None:
        self._cell = cell
        self._client = client

    def deploy(self, name: DeploymentName, model: DeploymentName) -> None:
        self._client.deploy(
            DeploymentSpec(
                name=name,
                source=own_source(model),
                context_tokens_max=CONTEXT_TOKENS,
                slo=SLO,
                scaling=Scaling(keep_alive_s=600.0, replicas_max=1),
            )
        )

    def offered(self, *calls: Call) -> None:
        answers = offer(self._cell.address, calls, call_s_max=CALL_S_MAX)
        self._cell.check_alive()
        for asked, answer in zip(calls, answers, strict=True):
            if len(answer.tokens_s) != asked.output_tokens:
                raise MeshError(f"{asked.deployment} was not served")

    def instance(self, name: DeploymentName) -> InstanceId:
        (only,) = self._client.get(name).instances
        return only.instance_id


def play(store: Path, loads: int, told: Callable[[str], None]) -> tuple[list[Load], Iterations]:
    """All loads after the first ones, and the neighbour's iterations."""
    first, beside, met = named("first", 1), named("beside", loads), named("met", loads)
    models = [NEIGHBOUR, SHARED, *first, *beside, *met]
    told(f"{len(models)} models")
    plant_models(store, models)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        opened = local_cell(store=store, node_journals=folder, prefetch_bytes=0, page_cache_bytes=0)
        with opened as cell, MeshClient(cell.address) as client:
            scene = Scene(cell, client)
            for model in models:
                scene.deploy(model, model)
            twins = named("twin", 2 * loads)
            for twin in twins:
                scene.deploy(twin, SHARED)
            told("the shape is compiled")
            scene.offered(call(first[0]))
            wait_until(
                lambda: bool(list(store.glob("compiled/*.blob"))),
                "the shape has no blob",
                BLOB_S_MAX,
            )
            scene.offered(call(NEIGHBOUR))
            scene.offered(call(SHARED))
            wait_calm(cell)
            since_s = time.monotonic()
            told(f"{loads} loads beside {CALLERS} callers")
            neighbour = scene.instance(NEIGHBOUR)
            scene.offered(
                *(call(NEIGHBOUR, output_tokens=CONTEXT_TOKENS - 64) for _ in range(CALLERS)),
                *(call(m, FIRST_LOAD_S + n * APART_S) for n, m in enumerate(beside)),
            )
            told(f"{loads} wakes beside loads, and as many without")
            for number, model in enumerate(met):
                wait_calm(cell)
                scene.offered(call(model), call(twins[2 * number], WAKE_AFTER_S))
                wait_calm(cell)
                scene.offered(call(twins[2 * number + 1]))
        (journal,) = folder.glob("*.journal")
        decisions = [d for d in read_journal(journal)[1] if d.now_s >= since_s]
    found = loads_of(decisions)
    return found, iterations_of(decisions, neighbour, CALLERS, found)


def _row(what: str, seconds: Sequence[float]) -> tuple[str, ...]:
    if len(seconds) < 2:
        return (what, str(len(seconds)), "", "", "")
    p95_s = quantiles(seconds, n=20)[-1]
    shown = (f"{1000.0 * each:.1f}" for each in (mean(seconds), median(seconds), p95_s))
    return (what, str(len(seconds)), *shown)


def report(loads: Sequence[Load], iterations: Iterations) -> Report:
    alone_s, beside_s = wakes_of(loads)
    imports_s = [load.elapsed_s for load in loads if load.tier is LoadTier.PREPARED]
    rows = [
        _row("iteration", iterations.alone_s),
        _row("iteration beside a load", iterations.beside_s),
        _row("wake", alone_s),
        _row("wake beside a load", beside_s),
        _row("load", imports_s),
    ]
    pairs = {
        "neighbour_slowdown": (mean, iterations.beside_s, iterations.alone_s),
        "wake_beside_load_ratio": (median, beside_s, alone_s),
    }
    figures = {
        name: of(one) / of(other) if one and other else None
        for name, (of, one, other) in pairs.items()
    }
    return Report(
        figures={name: rounded(value) for name, value in figures.items()},
        shown=[Table(headings=("what", "count", "mean ms", "p50 ms", "p95 ms"), rows=rows)],
        targets={"neighbour_slowdown": "<= 1.5", "wake_beside_load_ratio": "<= 1.2"},
    )


def run(
    *,
    loads: Annotated[int, "loads beside the neighbour, and beside wakes"] = LOADS,
    quick: bool = False,
) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return report(*play(Path(folder), QUICK_LOADS if quick else loads, show_status))
