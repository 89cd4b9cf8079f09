"""Virtual cells behind a front: whole cells are killed under load, and start again."""

import io
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mesh import __version__
from mesh.core.front import FrontCore, ranked
from mesh.domain.ids import CellName
from mesh.domain.lifecycle import NodeState
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind, FinishReason, RefusalReason
from mesh.runtime.journal import FrontStart, Journal, read_journal, replay
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.faults import FaultKind, Faults, occurrences
from mesh.sim.groups import DeploymentGroup, NodeGroup
from mesh.sim.injection import Injection
from mesh.sim.scenario import Scenario, plan
from mesh.sim.workload import Serverless, arrivals_of, generated
from tests.sim.scenarios import scenario
from tests.sim.virtual_front import VirtualFront
from tests.support.depth import DEEP

log = logging.getLogger(__name__)

CELLS = [CellName("a"), CellName("b"), CellName("c")]
LOST = CELLS[0]
REQUESTS = 240
EVERY_S = 0.1
KINDS = (
    *(FaultKind.CRASH, FaultKind.VANISH, FaultKind.BREAK, FaultKind.SILENCE, FaultKind.LATE),
    *(FaultKind.KILL_CONTROLLER, FaultKind.STOP_CONTROLLER, FaultKind.LOSE, FaultKind.DRAIN),
)
MANY_CELLS, NODES = 100, 10
EACH_CELLS = 20
"""Deployments for each cell; two cells serve each."""


@pytest.fixture
def made(tmp_path: Path) -> CellPlan:
    return plan(scenario(tmp_path))


def plans(made: CellPlan, homes: int) -> dict[CellName, CellPlan]:
    """Three cells, each with the deployments that it is a home of."""
    return {
        cell: replace(
            made,
            deployments=tuple(
                one for one in made.deployments if cell in ranked(one.spec.name, CELLS)[:homes]
            ),
        )
        for cell in CELLS
    }


def load(made: CellPlan) -> list[Arrival]:
    names = [str(one.spec.name) for one in made.deployments]
    return [Arrival(EVERY_S * n, names[n % len(names)], 64, 30) for n in range(REQUESTS)]


def ends(outcomes: tuple[Outcome, ...]) -> dict[object, int]:
    found: dict[object, int] = {}
    for one in outcomes:
        found[one.end] = found.get(one.end, 0) + 1
    return found


def test_with_two_home_cells_no_request_fails_where_a_whole_cell_is_killed(made: CellPlan) -> None:
    front = VirtualFront(plans(made, 2))
    front.clock.call_at(front.clock.now_s() + 8.0, lambda: front.kill(LOST))
    outcomes = front.run(load(made))
    assert set(ends(outcomes)) <= {FinishReason.LENGTH, FinishReason.STOP}
    assert len(outcomes) == REQUESTS


def test_with_one_home_cell_only_its_own_are_refused_with_the_reason(made: CellPlan) -> None:
    front = VirtualFront(plans(made, 1))
    front.clock.call_at(front.clock.now_s() + 8.0, lambda: front.kill(LOST))
    outcomes = front.run(load(made))
    own = {one.spec.name for one in plans(made, 1)[LOST].deployments}
    assert own, "some deployment lives there"
    for one in outcomes:
        if one.deployment not in own:
            assert one.end in (FinishReason.LENGTH, FinishReason.STOP)
        elif one.arrival_s > 20.0:
            assert one.end is RefusalReason.CELL_AWAY


def test_a_cell_whose_next_leader_comes_soon_loses_nothing_with_one_home(made: CellPlan) -> None:
    front = VirtualFront(plans(made, 1))
    for n in range(6):
        at_s = front.clock.now_s() + 3.0 + 3.0 * n
        cell = CELLS[n % len(CELLS)]
        front.clock.call_at(at_s, partial(front.kill_controller, cell))
        front.clock.call_at(at_s + 1.0, partial(front.start, cell))
    outcomes = front.run(load(made))
    assert set(ends(outcomes)) <= {FinishReason.LENGTH, FinishReason.STOP}


def test_a_whole_cell_that_is_killed_comes_back_with_empty_nodes(made: CellPlan) -> None:
    front = VirtualFront(plans(made, 2))
    nodes = front.cells[LOST].nodes
    looks: list[tuple[bool, bool]] = []

    def look() -> None:
        looks.append(
            (any(n.agent.alive for n in nodes), any(n.engine.has_instances() for n in nodes))
        )

    began_s = front.clock.now_s()
    for at_s, what in ((7.9, look), (8.0, partial(front.kill, LOST)), (8.1, look)):
        front.clock.call_at(began_s + at_s, what)
    front.clock.call_at(began_s + 12.0, partial(front.start, LOST))
    front.clock.call_at(began_s + 12.0, look)
    outcomes = front.run(load(made))
    assert set(ends(outcomes)) <= {FinishReason.LENGTH, FinishReason.STOP}
    before, killed, back = looks
    assert (before, killed[0], back) == ((True, True), False, (True, False))
    seen = front.cells[LOST].core.snapshot(front.clock.now_s()).nodes
    assert [one.state for one in seen] == [NodeState.READY] * len(nodes)


@pytest.mark.parametrize("seed", range(100 if DEEP else 3))
def test_every_request_ends_whatever_fails_in_all_cells(made: CellPlan, seed: int) -> None:
    """And its tokens come once each, which the callers check."""
    front = VirtualFront(plans(made, 2))
    kinds = Faults(until_s=EVERY_S * REQUESTS, per_minute=dict.fromkeys(KINDS, 4.0), vary=True)
    injected = [
        Injection(cell, occurrences(kinds, [node.node_id for node in cell.nodes], 3 * seed + n))
        for n, cell in enumerate(front.cells.values())
    ]
    assert len(front.run(load(made))) == REQUESTS
    assert any(one.done.total() for one in injected)


@pytest.mark.skipif(not DEEP, reason="it takes more than ten minutes: MESH_DEEP=1")
def test_many_cells_meet_the_slo_as_one_cell_of_as_many_nodes_does() -> None:
    names = [CellName(f"c-{n}") for n in range(MANY_CELLS)]
    groups = tuple(
        DeploymentGroup(name=f"d{n}", count=EACH_CELLS * MANY_CELLS // 2, model="llama-2-7b")
        for n in range(2)
    )
    asked = Serverless(duration_s=10.0, rate_per_s=6.0 * MANY_CELLS)

    def cell(nodes: int) -> CellPlan:
        node = NodeGroup(name="gpu", count=nodes, device=DeviceKind.GPU, memory_gib=40.0)
        return plan(Scenario(nodes=(node,), deployments=groups, workload=asked))

    one, each = cell(NODES * MANY_CELLS), cell(NODES)
    deployed = [str(made.spec.name) for made in one.deployments]
    arrivals = list(arrivals_of(generated(asked, len(deployed), seed=1), deployed))
    homes = {made.spec.name: ranked(made.spec.name, names)[:2] for made in one.deployments}
    cells = {
        name: replace(
            each, deployments=tuple(d for d in each.deployments if name in homes[d.spec.name])
        )
        for name in names
    }
    met = [
        sum(outcome.met for outcome in ended)
        for ended in (VirtualFront(cells).run(arrivals), VirtualCell(one).run(arrivals))
    ]
    log.info("%d calls, met by %d cells and by one: %s", len(arrivals), MANY_CELLS, met)
    assert met[0] >= 0.97 * met[1]


def test_its_journal_replays(made: CellPlan, tmp_path: Path) -> None:
    start = FrontStart(version=__version__, cells=tuple(CELLS))
    written = io.StringIO()
    front = VirtualFront(plans(made, 2), recorders=[Journal(written, start)])
    front.clock.call_at(front.clock.now_s() + 4.0, lambda: front.kill(LOST))
    front.run(load(made)[:80])
    path = tmp_path / "front"
    path.write_text(written.getvalue())
    read, decisions = read_journal(path)
    assert read == start
    assert replay(FrontCore(tuple(CELLS)), decisions) is None
