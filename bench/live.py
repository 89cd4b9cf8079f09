"""Plays a scenario on live cells, and beside its peers, and reports what it says of them.

A scene's loads are offered to a cell of mesh, then to the scene's peer, with the same calls, each
at its time whatever became of those before. Before: `scenario`. After: `harness`, which shows the
report.
"""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from statistics import fmean

from bench.audit import Audit, audit
from bench.cells import LOADED_S_MAX, local_cell, measured_profile, nodes_apart, wait_calm
from bench.cold_start_cell import forget
from bench.demo_model import store_path, stored_model
from bench.fleet_swapper import swapped
from bench.harness import Report, Table, rounded, show_status
from bench.judging import Judgement, judge, judged
from bench.overcommit_shapes import Resident, booked_over_rss, watched
from bench.own_models import own_source, plant_models
from bench.played import Played, measured
from bench.scenario import Asked, Cell, Peer, Scenario, Scene, read_scenario, wanted
from bench.sending import (
    AtOnce,
    Load,
    Overload,
    Poisson,
    Returns,
    Waves,
    calls_for,
    limit_bytes,
)
from bench.spans import spans_of
from mesh.cli.output import message
from mesh.cli.waiting import POLL_S, Goal, wait_for
from mesh.compute.times import Times
from mesh.controller.registry import SqliteRegistry, profile_stored
from mesh.core.controller.core import ControllerCore
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import Cancelled, InvalidInput, Unavailable
from mesh.domain.events import ControllerEvent, NodeReported
from mesh.domain.ids import DeploymentName
from mesh.domain.messages import InstanceLoaded
from mesh.domain.model import Footprint, KvPrecision, WeightPrecision
from mesh.domain.profile import Profile
from mesh.domain.reasons import ProfileSource
from mesh.domain.views import Arrivals, InstanceSnapshot
from mesh.evaluation.fidelity.calibrating import calibrate
from mesh.evaluation.fidelity.live import live_run
from mesh.evaluation.fidelity.observing import pooled
from mesh.evaluation.fidelity.report import SIMULATIONS, LiveRun, calibrated
from mesh.evaluation.load_client import Answer, Call, offer, offer_again
from mesh.memory.demand import recommended
from mesh.runtime.journal import ControllerStart, Decision, read_journal
from mesh.runtime.starting import controller_core
from mesh.sim.cluster import SETTLE_S
from mesh.wire.client import MeshClient
from mesh_nodes.engines.openvino.footprint import estimate
from mesh_nodes.hardware import probe

PROFILED = DeploymentName("profiled")
CONTROLLERS = "controller.journal"
BASE_BYTES = 192 * 2**20
"""For a node's process without instances, which takes 165 MiB; less than an instance more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What became of a scene, by its loads."""

    scene: Scene
    ours: Sequence[Played]
    peers: Mapping[str, Sequence[Played]] = field(default_factory=dict)
    """By name, those that were asked for."""


Sent = list[tuple[list[Call], Played]]
"""By load: the calls, and what became of them."""


class Stage:
    """`folder` keeps models and the state of cells from one run to the next."""

    def __init__(self, folder: Path, asked: Asked) -> None:
        self._folder = folder
        self._own = folder / "store"
        self._asked = asked
        self._planted: set[str] = set()
        self._surveyed: dict[tuple[str, int], Profile] = {}
        """By scene and number of nodes, what its first cell with so many has measured on one of
        them: the others know it from their beginning. A node with other cores takes other times.
        """

    def play(self, scene: Scene) -> Shown:
        """Raises MeshError when a part of a cell does not start or ends."""
        self._plant(scene)
        ours: dict[str, Played] = {}
        asked = [of for of in scene.peers if self._asked.peer or of.cell is not None]
        peers: dict[str, dict[str, Played]] = {peer.name: {} for peer in asked}
        apart = [[load] for load in scene.loads]
        for number in range(self._asked.rounds):
            seed = self._asked.seed + number
            for loads in apart if scene.fresh or scene.cold else [list(scene.loads)]:
                sent = self._in_cell(scene, scene.cell, loads, seed, [])
                _added(ours, sent)
                for peer in asked:
                    _added(peers[peer.name], self._by_peer(scene, peer, loads, seed, sent))
        if scene.simulated and self._asked.sim:
            ours = self._simulated(scene, ours)
        told = {name: list(made.values()) for name, made in peers.items()}
        return Shown(scene=scene, ours=list(ours.values()), peers=told)

    def _plant(self, scene: Scene) -> None:
        cells = [scene.cell, *(peer.cell for peer in scene.peers if peer.cell is not None)]
        if not all(scene.own_models(cell) for cell in cells):
            stored_model()
        if not any(scene.own_models(cell) for cell in cells):
            return
        names = [name for group in scene.deployments for name in group.names()] + [PROFILED]
        missing = [name for name in names if name not in self._planted]
        show_status(f"{scene.name}: {len(missing)} models")
        plant_models(self._own, missing, scene.cell.weights)
        self._planted.update(missing)

    def _store(self, scene: Scene, cell: Cell) -> Path:
        return self._own if scene.own_models(cell) else store_path()

    def _in_cell(
        self, scene: Scene, cell: Cell, loads: Sequence[Load], seed: int, given: Sent
    ) -> Sent:
        """`given` has the calls where another cell had them before."""
        specs, store = scene.specs(cell), self._store(scene, cell)
        memory_bytes = self._memory_bytes(scene, cell, loads, seed)
        with tempfile.TemporaryDirectory() as folder:
            home, journals = Path(folder) / "home", Path(folder) / "journals"
            journals.mkdir()
            home.mkdir()
            if scene.cold:
                _copy(self._deployed(scene, cell), home)
                forget(store)
            if not scene.compiled:
                shutil.rmtree(store / "compiled", ignore_errors=True)
            known = self._surveyed.get((scene.name, cell.nodes))
            if known is not None:
                with closing(SqliteRegistry(home / "controller")) as registry:
                    registry.apply(profile_stored(known))
            kept = scene.cold or scene.audited
            with (
                local_cell(
                    home=home,
                    store=store,
                    nodes=nodes_apart(cell.nodes),
                    policy=cell.policy,
                    memory_bytes=memory_bytes and _part(memory_bytes, cell.nodes),
                    prefetch_bytes=None if cell.ahead else 0,
                    page_cache_bytes=None if cell.ahead else 0,
                    journal=journals / CONTROLLERS if kept else None,
                    node_journals=journals if kept else None,
                ) as local,
                MeshClient(local.address) as client,
                ExitStack() as opened,
            ):
                for spec in () if scene.cold else specs:
                    show_status(f"{scene.name}: deploy {spec.name}")
                    client.deploy(spec)
                for spec in specs if scene.resident else ():
                    wait_for(client, spec.name, Goal.READY, LOADED_S_MAX)
                times = None
                if scene.surveyed and not scene.cold:
                    if known is None:
                        known = measured_profile(local.address, specs[0].name, show_status)
                        self._surveyed[scene.name, cell.nodes] = known
                    times = Times(known)
                node = client.nodes()[0]
                found: Sent = []
                resident = None
                if scene.audited and memory_bytes is not None:
                    pid = local.children[1].process.pid
                    resident = opened.enter_context(watched(pid, memory_bytes))
                for number, load in enumerate(loads):
                    if scene.resident:
                        wait_calm(local)
                    calls = given[number][0] if given else load.calls(specs, seed, times)
                    if scene.each_first:
                        for spec in specs:
                            first = replace(calls[0], at_s=0.0, deployment=spec.name)
                            offer(local.address, [first], call_s_max=scene.call_s_max)
                    show_status(f"{scene.name}, {load.name}: {len(calls)} calls")
                    made = _offered(scene, load, local.address, calls)
                    if isinstance(load, Overload) and times is not None:
                        share = load.best_effort_share(made.judged, times)
                        offered = load.offered(calls, times)
                        made = replace(made, offered=(offered,), best_effort_shares=share)
                    if any(spec.scaling.plan is not None for spec in specs):
                        made = _forecast(client, specs, made)
                    found.append((calls, replace(made, surveyed=scene.surveyed)))
                instances = _instances(client)
                views = client.profiles(specs[0].name)
                local.check_alive()
            if scene.cold:
                ((calls, made),) = found
                run = live_run(
                    home,
                    journals / f"{node.node_id}.journal",
                    node=node,
                    profile=next(
                        v.profile for v in views if v.profile.fingerprint == node.fingerprint
                    ),
                    calls=calls,
                    answers=[each.answer for each in made.judged.all],
                    calibrated_s=_lasted_s(made.judged),
                )
                found = [(calls, _told(made, run, load_errors(journals / CONTROLLERS)))]
            if kept and self._asked.journal is not None:
                shutil.copy(journals / CONTROLLERS, self._asked.journal)
            if resident is not None:
                show_status(f"{scene.name}: deciding the journal again")
                books = audit(journals / CONTROLLERS)
                found = [(c, _audited(p, books, resident)) for c, p in found]
        return [(calls, replace(made, instances=instances)) for calls, made in found]

    def _by_peer(
        self, scene: Scene, peer: Peer, loads: Sequence[Load], seed: int, sent: Sent
    ) -> Sent:
        if peer.cell is not None:
            theirs = scene.beside(peer)
            specs = theirs.specs(peer.cell)
            given = [
                (calls_for(specs, calls, best_effort=peer.best_effort), made)
                for calls, made in sent
            ]
            return self._in_cell(theirs, peer.cell, loads, seed, given)
        found: Sent = []
        for (calls, _), load in zip(sent, loads, strict=True):
            show_status(f"{scene.name}, {load.name}: {len(calls)} calls to its peer")
            names = [spec.name for spec in scene.specs()]
            answers, spans = swapped(
                calls,
                resident_max=scene.cell.memory_for or len(names),
                preloaded=names if scene.resident else (),
                call_s_max=scene.call_s_max,
            )
            made = _about(load, Played(judged=judge(calls, answers), spans=spans))
            found.append((calls, made))
        return found

    def _memory_bytes(
        self, scene: Scene, cell: Cell, loads: Sequence[Load], seed: int
    ) -> int | None:
        """`--memory` of all nodes together."""
        if cell.memory_for is not None:
            # A peer that differs in how weights are held has the same memory.
            plain = next((peer.cell for peer in scene.peers if peer.cell is not None), cell)
            if scene.cold:
                with closing(SqliteRegistry(self._deployed(scene, plain) / "controller")) as known:
                    first = known.deployments()[0]
                footprint, context = dict(first.footprints)["openvino"], first.context_tokens_max
            else:
                footprint, context = _estimated(), scene.deployments[0].context_tokens_max
            blocks = recommended(footprint.blocks_for(context))
            return BASE_BYTES + cell.memory_for * footprint.instance_bytes(blocks)
        if cell.overcommit is not None:
            (load,) = loads
            assert isinstance(load, Waves), "a scene with overcommit has waves"
            specs = scene.specs(cell)
            return limit_bytes(load.waves(specs, seed), specs, _estimated(), cell.overcommit)
        return cell.memory_bytes

    def _deployed(self, scene: Scene, cell: Cell) -> Path:
        """The state of a cell with the scene's deployments, each with a surveyed profile where the
        scene wants that; made once.
        """
        kind = f"{cell.weights or 'default'}-{'' if cell.prefix_cache else 'un'}cached"
        kind += "-shared" if cell.shared else ""
        home = self._folder / f"{scene.name}-{kind}"
        if home.exists():
            return home
        home.mkdir()
        specs, store = scene.specs(cell), self._store(scene, cell)
        with local_cell(home=home, store=store) as local, MeshClient(local.address) as client:
            if scene.surveyed:
                source = own_source(PROFILED) if scene.own_models(cell) else specs[0].source
                model = replace(specs[0], name=PROFILED, source=source)
                client.deploy(model)
                measured_profile(local.address, PROFILED, show_status)
                client.delete(PROFILED)
            for spec in specs:
                show_status(f"{scene.name}: deploy {spec.name}")
                client.deploy(spec)
        with closing(SqliteRegistry(home / "controller")) as registry:
            surveyed = [p for p in registry.profiles() if p.source is ProfileSource.SURVEY]
            for profile in surveyed[:1]:
                for deployment in registry.deployments():
                    model_id = deployment.model.model_id
                    registry.apply(profile_stored(replace(profile, model_id=model_id)))
        return home

    def _simulated(self, scene: Scene, ours: dict[str, Played]) -> dict[str, Played]:
        """What virtual nodes meet when they get the same calls. They have the costs that all runs
        tell together, at the pace of each; runs may be too short for that, or never without a load.
        """
        show_status(f"{scene.name}: simulated")
        runs = [made.run for made in ours.values() if made.run is not None]
        first, last = runs[0], runs[-1]
        try:
            costs = calibrate(
                pooled([run.observed for run in runs]),
                Times(first.profile),
                from_s=first.start_s,
                until_s=last.start_s + last.calibrated_s,
            )
            shares = [
                fmean(
                    outcome.met_in_the_mean_without_grace
                    for outcomes in calibrated(run, costs).simulations(run, SIMULATIONS)
                    for outcome in outcomes
                )
                for run in runs
            ]
        except InvalidInput as error:
            message(f"{scene.name}, not simulated: {error}")
            return ours
        return {
            name: replace(made, simulated_met_share=share)
            for (name, made), share in zip(ours.items(), shares, strict=True)
        }


def _estimated() -> Footprint:
    """What an instance of the demo model takes, as a node would say before its first load."""
    return estimate(
        stored_model().info,
        weights=WeightPrecision.I8,
        kv=KvPrecision.F16,
        repacks=not probe().has_vnni,
    )


def _part(memory_bytes: int, nodes: int) -> int:
    """The memory of one of so many nodes, each of which has a process of its own."""
    return BASE_BYTES + (memory_bytes - BASE_BYTES) // nodes


def _added(to: dict[str, Played], sent: Sent) -> None:
    for _, made in sent:
        to[made.name] = to[made.name] + made if made.name in to else made


def _about(load: Load, made: Played) -> Played:
    if not isinstance(load, Poisson):
        return replace(made, name=load.name)
    return replace(made, name=load.name, rate=load.rate, seconds=load.seconds)


def _offered(scene: Scene, load: Load, address: str, calls: Sequence[Call]) -> Played:
    answers: list[Answer]
    retries: list[tuple[Call, Answer]] = []
    if isinstance(load, Returns):
        answers = []
        with MeshClient(address) as client:
            for call in calls:
                _unload(client, call.deployment)
                answers += offer(address, [call], call_s_max=scene.call_s_max)
    elif isinstance(load, AtOnce) and load.one_by_one:
        answers = [a for c in calls for a in offer(address, [c], call_s_max=scene.call_s_max)]
    else:
        answers, retries = offer_again(
            address,
            calls,
            retries_max=int(scene.come_again),
            call_s_max=scene.call_s_max,
        )
    again = Judgement(tuple(judged(*retry) for retry in retries))
    return _about(load, Played(judged=judge(calls, answers), again=again))


def _unload(client: MeshClient, name: DeploymentName) -> None:
    """Raises Cancelled when its instances are not gone in time."""
    client.unload(name)
    until_s = time.monotonic() + LOADED_S_MAX
    while client.get(name).instances:
        if time.monotonic() > until_s:
            raise Cancelled(f"{name} still has instances after {LOADED_S_MAX:g} s")
        time.sleep(POLL_S)


def _instances(client: MeshClient) -> tuple[InstanceSnapshot, ...]:
    found = (i for deployment in client.list() for i in deployment.instances)
    return tuple(i for i in found if i.tier is not None)


def _forecast(client: MeshClient, specs: Sequence[DeploymentSpec], made: Played) -> Played:
    """With how far plans for the calls of a load are off in what those that no load made late met
    with, in the mean; without those that nothing can be planned for, whose number is told.
    """
    expected, came, refused = [0.0, 0.0], [0.0, 0.0], 0
    for spec in specs:
        mine = [each for each in made.judged.all if each.call.deployment == spec.name]
        met = [each.outcome for each in mine if each.outcome.promised_in_time]
        ttfts_s = [outcome.ttft_s for outcome in met if outcome.ttft_s is not None]
        tpots_s = [outcome.tpot_s for outcome in met if outcome.tpot_s is not None]
        if not ttfts_s or not tpots_s:
            continue
        calls = Arrivals(
            rate_per_s=len(mine) / made.seconds,
            prompts=tuple(sorted(len(each.call.prompt_tokens) for each in mine)),
            answer_tokens=fmean(each.call.output_tokens for each in mine),
        )
        try:
            plan = client.plan(spec.name, calls)
        except (InvalidInput, Unavailable) as error:
            message(f"{spec.name}, not planned: {error}")
            refused += 1
            continue
        for n, (one_s, seconds) in enumerate(((plan.ttft_s, ttfts_s), (plan.tpot_s, tpots_s))):
            expected[n] += one_s * len(seconds)
            came[n] += sum(seconds)
    ttft, tpot = ((abs(e / c - 1),) if c else () for e, c in zip(expected, came, strict=True))
    made = replace(made, forecasts_refused=refused)
    return replace(made, ttft_forecast_errors=ttft, tpot_forecast_errors=tpot)


def _audited(made: Played, books: Audit, resident: Resident) -> Played:
    """With what the journal says of the cell, and of the time of this load."""
    from_s = made.judged.all[0].answer.sent_s
    loaded, kept = books.instance_seconds(from_s, from_s + _lasted_s(made.judged))
    return replace(
        made, audit=books, resident=resident, loaded_seconds=loaded, instance_seconds=kept
    )


def _lasted_s(judgement: Judgement) -> float:
    answers = [each.answer for each in judgement.all]
    return max(a.sent_s + a.ended_s for a in answers) - answers[0].sent_s


def _told(made: Played, run: LiveRun, errors: Iterable[float]) -> Played:
    """With what journals say."""
    began_s = run.observed.first_s
    lead_s = 0.0 if began_s is None else max(run.start_s - began_s - SETTLE_S, 0.0)
    return replace(
        made,
        run=replace(run, lead_s=lead_s),
        spans=spans_of(run.observed),
        load_errors=tuple(errors),
    )


def _copy(home: Path, to: Path) -> None:
    """The controller's state: the store is linked anew, and logs stay."""
    shutil.copytree(home / "controller", to / "controller")


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


def figures(scenario: Scenario, shown: Shown) -> dict[str, object]:
    """Lists are by load. A scene with figures of its own that has none tells of all loads alone."""
    scene = shown.scene
    each, whole = scenario.figures, scenario.whole
    if scene.figures is not None:
        each, whole = scene.figures, scene.whole
    together = reduce(add, shown.ours)
    found: dict[str, object] = {
        f"{scene.mark}{name}": [measured(one, spec) for one in shown.ours]
        for name, spec in each.items()
    }
    found |= {f"{scene.mark}{name}": measured(together, spec) for name, spec in whole.items()}
    for peer in scene.peers:
        theirs = shown.peers.get(peer.name, ())
        if theirs and not each:
            pairs = [(together, reduce(add, theirs))]
        else:
            pairs = list(zip(shown.ours, theirs, strict=False))
        by_load: dict[str, Sequence[object]] = {
            f"{peer.name}_{name}": [measured(one, spec) for _, one in pairs]
            for name, spec in scenario.peer_figures.items()
        }
        for name, spec in peer.ratios.items():
            by_load[name] = [_ratio(one, other, peer, spec) for one, other in pairs]
        found |= {name: of if each else of[0] for name, of in by_load.items() if each or of}
        for name, spec in peer.enough.items() if theirs else ():
            two = [_numbers(one, other, spec) for one, other in pairs]
            found[name] = rounded(fmean(its >= mine for mine, its in two))
    return found


def _ratio(ours: Played, peer: Played, of: Peer, spec: str) -> float | None:
    """A figure of mesh's over the peer's; `None` where the peer has none."""
    one, other = _numbers(ours, peer, spec)
    if not other:
        return None
    return rounded(1 - one / other) if of.lacks else rounded(one / other, 2)


def _numbers(ours: Played, peer: Played, spec: str) -> tuple[float, float]:
    one, other = measured(ours, spec), measured(peer, spec)
    assert isinstance(one, int | float), f"{spec} is a number"
    assert isinstance(other, int | float), f"{spec} is a number"
    return one, other


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _table(shown: Shown, told: Mapping[str, object]) -> Table:
    names = [one.name for one in shown.ours]
    rows = []
    for name, value in told.items():
        cells = value if isinstance(value, list) else [value]
        cells = [*map(_cell, cells), *[""] * (len(names) - len(cells))]
        rows.append((name.replace("_", " "), *cells))
    return Table(headings=("figure", *names), rows=rows, title=f"\n{shown.scene.name}")


def report(scenario: Scenario, played: Sequence[Shown]) -> Report:
    told = [figures(scenario, each) for each in played]
    found = {name: value for each in told for name, value in each.items()}
    made = Report(
        figures=found,
        shown=[_table(each, of) for each, of in zip(played, told, strict=True)],
        targets={name: to for name, to in scenario.targets.items() if name in found},
        surveyed=any(each.scene.surveyed for each in played),
    )
    return replace(made, figures={**found, "faults": made.missed()})


def perform(path: Path, asked: Asked) -> Report:
    scenario = read_scenario(path)
    scenes = wanted(scenario, asked)
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), asked)
        played = [stage.play(each) for each in scenes]
    if not asked.quick and any(each.shapes for each in scenes):
        show_status("what two shapes take")
        taken = dict(booked_over_rss())
        played = [
            replace(each, ours=[replace(one, shapes=taken) for one in each.ours])
            if each.scene.shapes
            else each
            for each in played
        ]
    return report(scenario, played)
