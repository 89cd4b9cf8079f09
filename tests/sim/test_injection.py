"""One fault at a time: what it does to a cell, and what becomes of the requests."""

from pathlib import Path

import pytest

from mesh.domain.ids import NodeId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.sim.checking import FaultyRun
from mesh.sim.cluster import Arrival, CellPlan
from mesh.sim.faults import Fault, FaultKind
from mesh.sim.scenario import plan
from tests.sim.scenarios import SMALL, scenario

LONG = Arrival(0.0, "chat-1", 100, 200)
AT_S = 5.0
"""Amid the long answer, which a CPU takes 20 s for."""


@pytest.fixture
def made(tmp_path: Path) -> CellPlan:
    return plan(scenario(tmp_path))


def fault(kind: FaultKind, node: str = "cpu", *, size: float = 0.0, chance: float = 0.0) -> Fault:
    return Fault(
        at_s=AT_S, kind=kind, node_id=NodeId(node), until_s=AT_S + 2.0, size=size, chance=chance
    )


def run(made: CellPlan, one: Fault, *more: Arrival) -> tuple[FaultyRun, list[Outcome]]:
    """Runs the cell under checks to the end. The outcomes are ordered by their arrival."""
    faulty = FaultyRun(made, [one], check=True)
    outcomes = faulty.run([LONG, *more])
    assert faulty.counts().faults == ((one.kind.value, 1),)
    return faulty, sorted(outcomes, key=lambda outcome: outcome.arrival_s)


def loads(faulty: FaultyRun) -> dict[str, int]:
    return {node.node_id: node.engine.loads for node in faulty.cell.nodes if node.engine.loads}


@pytest.mark.parametrize(
    ("kind", "pause_s"), [(FaultKind.CRASH, 0.0), (FaultKind.VANISH, 9.0), (FaultKind.BREAK, 0.0)]
)
def test_requests_of_a_lost_node_continue_elsewhere_after_their_tokens(
    made: CellPlan, kind: FaultKind, pause_s: float
) -> None:
    """Where nobody is told, when the lease has run out."""
    faulty, (outcome,) = run(made, fault(kind, size=0.3, chance=0.3))
    assert outcome.end is FinishReason.STOP
    assert len(outcome.tokens_s) == 200
    gaps = [b - a for a, b in zip(outcome.tokens_s, outcome.tokens_s[1:], strict=False)]
    before = [at for at in outcome.tokens_s if at < faulty.cell.started_s + AT_S]
    assert 10 < len(before) < 190
    assert max(gaps) > pause_s
    assert gaps.index(max(gaps)) == pytest.approx(len(before) - 1, abs=1)


def test_a_killed_controller_leaves_its_callers_and_finds_its_instances_again(
    made: CellPlan,
) -> None:
    down = Arrival(AT_S + 1.0, "chat-1", 10, 5)
    later = Arrival(AT_S + 2.9, "chat-1", 10, 5)
    faulty, (first, second, third) = run(made, fault(FaultKind.KILL_CONTROLLER), down, later)
    assert first.end is FinishReason.FAILED
    assert 0 < len(first.tokens_s) < 200
    assert (second.end, second.tokens_s) == (FinishReason.FAILED, ())
    assert third.end is FinishReason.STOP
    assert faulty.cell.controller.epoch == 2
    assert loads(faulty) == {"cpu": 1}, "what was loaded is adopted"


def test_a_controller_that_stops_answers_everybody_first(made: CellPlan) -> None:
    faulty, (outcome,) = run(made, fault(FaultKind.STOP_CONTROLLER))
    assert outcome.end is RefusalReason.SHUTTING_DOWN
    assert outcome.ended_s == faulty.cell.started_s + AT_S


def test_a_client_that_goes_away_frees_its_place(made: CellPlan) -> None:
    faulty, (outcome,) = run(made, fault(FaultKind.CANCEL))
    assert outcome.end is FinishReason.CANCELLED
    assert not faulty.cell.core.cell.requests


def test_an_instance_that_is_killed_is_loaded_again_for_its_requests(made: CellPlan) -> None:
    faulty, (outcome,) = run(made, fault(FaultKind.LOSE))
    assert (outcome.end, len(outcome.tokens_s)) == (FinishReason.STOP, 200)
    before = [at for at in outcome.tokens_s if at < faulty.cell.started_s + AT_S]
    assert 10 < len(before) < 190
    assert sum(loads(faulty).values()) == 2


def test_an_idle_instance_that_is_killed_is_loaded_again_for_its_minimum(tmp_path: Path) -> None:
    """And the request of its neighbour goes on."""
    small = 'name = "small"\n'
    text = SMALL.replace(small, small + "scaling = { replicas_min = 1 }\n")
    faulty, (outcome,) = run(plan(scenario(tmp_path, text)), fault(FaultKind.LOSE, chance=0.9))
    assert (outcome.end, len(outcome.tokens_s)) == (FinishReason.STOP, 200)
    assert loads(faulty) == {"cpu": 2, "gpu-1": 1}, "the next one goes where none has broken"
    assert "small" in {i.deployment for i in faulty.cell.core.cell.instances.values()}


def test_an_agent_whose_name_is_still_taken_is_started_until_it_is_taken_in(
    made: CellPlan,
) -> None:
    """Its machine went without a word and is back before the lease has run out."""
    faulty, _ = run(made, fault(FaultKind.VANISH))
    (node,) = (node for node in faulty.cell.nodes if node.node_id == "cpu")
    run_id = faulty.cell.core.cell.nodes[node.node_id].hello.run_id
    assert int(run_id.rpartition("-")[2]) > 3


def test_a_fault_that_meets_nothing_is_none(made: CellPlan) -> None:
    early = fault(FaultKind.CANCEL)
    faulty = FaultyRun(made, [early], check=True)
    faulty.run([Arrival(0.0, "small", 10, 2)])
    assert faulty.counts().faults == ()
