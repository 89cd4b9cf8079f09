"""Where the seconds of a node went: a kind for each moment of a span of time; pure.

What is computed hides a load beside it: loads count while nothing else is done. Resizes take
milliseconds and are idle time. Before: a node's journal, or what the swapper says of itself. After:
`report`.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from bench.cells import LOADED_S_MAX, local_cell, measured_profile, wait_calm
from bench.cold_start_cell import forget
from bench.fleet_workload import CONTEXT_TOKENS, Kind, Scene, Span
from bench.own_models import own_source
from mesh.cli.waiting import Goal, wait_for
from mesh.compute.times import Times
from mesh.controller.registry import SqliteRegistry
from mesh.core.controller.core import ControllerCore
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.events import ControllerEvent, NodeReported
from mesh.domain.ids import DeploymentName
from mesh.domain.messages import InstanceLoaded
from mesh.domain.model import WeightPrecision
from mesh.domain.reasons import ProfileSource
from mesh.domain.slo import Slo
from mesh.evaluation.fidelity.calibrating import calibrate
from mesh.evaluation.fidelity.live import live_run
from mesh.evaluation.fidelity.observing import Observed, pooled
from mesh.evaluation.fidelity.report import SIMULATIONS, LiveRun, calibrated
from mesh.evaluation.load_client import Answer, Call, offer
from mesh.runtime.journal import ControllerStart, Decision, read_journal
from mesh.runtime.starting import controller_core
from mesh.sim.cluster import SETTLE_S
from mesh.wire.client import MeshClient


def spans_of(observed: Observed) -> list[Span]:
    """The spans of a node's compute and loading lanes."""
    prompts = [(s, Kind.PREFILL if s.shape.prefill_tokens else Kind.DECODE) for s in observed.steps]
    first_runs = [(s, Kind.FIRST_RUN) for s in observed.primings]
    return [
        *(Span(kind, s.began_s, s.began_s + s.took_s) for s, kind in prompts + first_runs),
        *(Span(Kind.UNLOAD, s.began_s, s.began_s + s.took_s) for s in observed.unloads),
        *(Span(Kind.LOAD, s.began_s, s.began_s + s.took_s) for s in observed.loads),
    ]


def load_errors(path: Path) -> Iterator[float]:
    """Raises InvalidInput when this is no journal of a controller."""
    start, decisions = read_journal(path)
    assert isinstance(start, ControllerStart), f"{path} is a node's journal"
    return errors_of(controller_core(start), decisions)


def errors_of(core: ControllerCore, decisions: Iterable[Decision]) -> Iterator[float]:
    """For each load that ended, first loads of a model included, how far the expectation at its
    beginning was off, as a share of the time from its command to the report.
    """
    for decision in decisions:
        event = decision.event
        assert isinstance(event, ControllerEvent), "a node's decision"
        if isinstance(event, NodeReported) and isinstance(event.report, InstanceLoaded):
            instance = core.cell.instances.get(event.report.instance_id)
            if instance is not None:
                took_s = decision.now_s - instance.load_started_s
                yield abs(took_s - instance.load_expected_s) / took_s
        core.handle(event, decision.now_s)


PROFILED = DeploymentName("profiled")
CONTROLLERS = "controller.journal"

Told = Callable[[str], None]


def profiled_home(home: Path, store: Path, weights: WeightPrecision | None, told: Told) -> None:
    """A state folder whose registry has a surveyed profile of the shape, and nothing else."""
    with local_cell(home=home, store=store) as cell, MeshClient(cell.address) as client:
        client.deploy(_spec(PROFILED, Slo(), Scaling(), weights=weights))
        measured_profile(cell.address, PROFILED, told)
        client.delete(PROFILED)


def deployed_home(profiled: Path, home: Path, store: Path, scene: Scene, told: Told) -> None:
    """The same with the scene's deployments, each with that profile if there is one."""
    if (profiled / "controller").exists():
        _copy(profiled, home)
    with local_cell(home=home, store=store) as cell, MeshClient(cell.address) as client:
        for name in scene.names():
            told(f"deploy {name}")
            client.deploy(
                _spec(
                    *(name, scene.slo, scene.scaling),
                    weights=scene.weights,
                    prefix_cache=scene.prefix_cache,
                )
            )
    with closing(SqliteRegistry(home / "controller")) as registry:
        surveyed = [p for p in registry.profiles() if p.source is ProfileSource.SURVEY]
        for profile in surveyed[:1]:
            for deployment in registry.deployments():
                registry.store_profile(replace(profile, model_id=deployment.model.model_id))


def memory_bytes(scene: Scene, deployed: Path) -> int | None:
    """`--memory` of the scene's node, for deployments as this state folder has them."""
    with closing(SqliteRegistry(deployed / "controller")) as registry:
        footprint = dict(registry.deployments()[0].footprints)["openvino"]
    return None if scene.resident else scene.memory_bytes(footprint)


def measured(
    scene: Scene,
    deployed: Path,
    store: Path,
    calls: Sequence[Call],
    call_s_max: float,
    *,
    memory_bytes: int | None,
    ahead: bool = True,
) -> tuple[list[Answer], LiveRun, tuple[float, ...]]:
    """Offer a fresh cell these calls, with nothing of the store in the page cache. All of the run
    is for calibrating. `memory_bytes`: of the node, its default unless given. `ahead`: whether it
    has models loaded, or read, before they are called. Last: see `load_errors`.

    Raises MeshError when a part of the cell ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        home, journals = Path(folder) / "home", Path(folder) / "journals"
        _copy(deployed, home)
        journals.mkdir()
        forget(store)
        with (
            local_cell(
                home=home,
                store=store,
                journal=journals / CONTROLLERS,
                node_journals=journals,
                memory_bytes=memory_bytes,
                prefetch_bytes=None if ahead else 0,
                page_cache_bytes=None if ahead else 0,
            ) as cell,
            MeshClient(cell.address) as client,
        ):
            if scene.resident:
                for name in scene.names():
                    wait_for(client, name, Goal.READY, LOADED_S_MAX)
                wait_calm(cell)
            (node,) = client.nodes()
            answers = offer(cell.address, calls, call_s_max=call_s_max)
            views = client.profiles(scene.names()[0])
            cell.check_alive()
        run = live_run(
            home,
            journals / f"{node.node_id}.journal",
            node=node,
            profile=next(v.profile for v in views if v.profile.fingerprint == node.fingerprint),
            calls=calls,
            answers=answers,
            calibrated_s=max(a.sent_s + a.ended_s for a in answers) - answers[0].sent_s,
        )
        errors = tuple(load_errors(journals / CONTROLLERS))
    began_s = run.observed.first_s
    lead_s = 0.0 if began_s is None else max(run.start_s - began_s - SETTLE_S, 0.0)
    return answers, replace(run, lead_s=lead_s), errors


def simulated_met_shares(runs: Sequence[LiveRun]) -> list[float]:
    """The shares of calls that virtual nodes meet when they get the same calls. They have the costs
    that all runs tell together, at the pace of each.

    Raises InvalidInput when the runs were too short for that, or never without a load.
    """
    first, last = runs[0], runs[-1]
    costs = calibrate(
        pooled([run.observed for run in runs]),
        Times(first.profile),
        from_s=first.start_s,
        until_s=last.start_s + last.calibrated_s,
    )
    return [
        fmean(
            outcome.met_in_the_mean_without_grace
            for outcomes in calibrated(run, costs).simulations(run, SIMULATIONS)
            for outcome in outcomes
        )
        for run in runs
    ]


def _spec(
    name: DeploymentName,
    slo: Slo,
    scaling: Scaling,
    *,
    weights: WeightPrecision | None = None,
    prefix_cache: bool = True,
) -> DeploymentSpec:
    return DeploymentSpec(
        name=name,
        source=own_source(name),
        context_tokens_max=CONTEXT_TOKENS,
        slo=slo,
        scaling=scaling,
        weights=weights,
        prefix_cache=prefix_cache,
    )


def _copy(home: Path, to: Path) -> None:
    """The controller's state: the store is linked anew, and logs stay."""
    shutil.copytree(home / "controller", to / "controller")
