"""Machines come and go as a virtual cell wants them."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from mesh.domain.actions import ReportMissingNodes, WantNodes
from mesh.runtime.journal import Journal, read_journal, replay
from mesh.runtime.starting import controller_core
from mesh.sim.checking import FaultyRun
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.faults import FaultKind, Faults, occurrences
from mesh.sim.scenario import plan
from tests.sim.scenarios import scenario

SCALED = """
seed = 3

[[limits.node_ranges]]
device = "cpu"
least = 1
most = 3

[[nodes]]
name = "cpu"
count = 3
device = "cpu"
memory_gib = 40
comes_s = {comes_s}

[[deployments]]
name = "chat"
count = 6
model = "llama-2-7b"

[workload]
duration_s = 10
requests_per_s = 1.0
input_tokens = [16, 600]
output_tokens = [1, 40]
"""


@dataclass
class Told:
    """What the controller said of its nodes, and when."""

    wanted: list[tuple[float, int]] = field(default_factory=list)
    missing_s: list[float] = field(default_factory=list)

    def record(self, now_s: float, event: object, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]
            if isinstance(action, WantNodes):
                self.wanted.append((now_s, action.wanted))
            elif isinstance(action, ReportMissingNodes):
                self.missing_s.append(now_s)


def scaled(folder: Path, comes_s: str = "10.0") -> CellPlan:
    return plan(scenario(folder, SCALED.format(comes_s=comes_s)))


def burst(from_s: float, until_s: float, each_s: float = 0.25) -> list[Arrival]:
    """Calls of all six deployments in turn."""
    count = int((until_s - from_s) / each_s)
    return [Arrival(from_s + n * each_s, f"chat-{n % 6 + 1}", 200, 60) for n in range(count)]


def alive(cell: VirtualCell) -> int:
    return sum(node.agent.alive for node in cell.nodes)


def test_a_burst_takes_one_machine_to_three_and_back_to_one(tmp_path: Path) -> None:
    told = Told()
    cell = VirtualCell(scaled(tmp_path), recorders=(told,))
    cell.clock.run_until(90.0)
    assert alive(cell) == 1
    began_s = cell.clock.now_s()
    cell.run(burst(0.0, 110.0))
    assert alive(cell) == 3
    came_s = next(at_s for at_s, wanted in told.wanted if wanted > 1)
    assert came_s - began_s < 60.0 + 15.0
    cell.clock.run_until(cell.clock.now_s() + 900.0)
    assert alive(cell) == 1
    assert [wanted for _, wanted in told.wanted][-1] == 1


@pytest.mark.parametrize("each_s", [0.4, 0.7])
def test_under_a_load_that_swings_it_changes_once_a_minute_at_most(
    tmp_path: Path, each_s: float
) -> None:
    told = Told()
    cell = VirtualCell(scaled(tmp_path), recorders=(told,))
    cell.clock.run_until(90.0)
    swings = [a for n in range(3) for a in burst(90.0 * n, 90.0 * n + 45.0, each_s)]
    cell.run(swings)
    times = [at_s for at_s, _ in told.wanted]
    assert len(times) > 1
    assert all(b - a >= 60.0 for a, b in pairwise(times))


def test_a_machine_that_never_comes_is_reported_within_a_minute(tmp_path: Path) -> None:
    told = Told()
    cell = VirtualCell(scaled(tmp_path, "inf"), recorders=(told,))
    cell.clock.run_until(150.0)
    assert alive(cell) == 0
    wanted_s = told.wanted[0][0]
    (missing_s,) = told.missing_s
    assert missing_s - wanted_s <= 60.0


def test_what_is_wanted_is_decided_again_from_a_journal(tmp_path: Path) -> None:
    made, path = scaled(tmp_path), tmp_path / "journal"
    with path.open("w") as file:
        cell = VirtualCell(made, recorders=(Journal(file, made.start()),))
        cell.run(burst(70.0, 90.0))
    start, decisions = read_journal(path)
    assert any(isinstance(a, WantNodes) for decision in decisions for a in decision.actions)
    _, decisions = read_journal(path)
    assert replay(controller_core(start), decisions) is None  # type: ignore[arg-type]


def test_under_faults_machines_come_and_go_and_nothing_breaks(tmp_path: Path) -> None:
    """Nodes crash, links break, controllers are killed and nodes drained, beside what is wanted."""
    made = scaled(tmp_path)
    kinds = (FaultKind.CRASH, FaultKind.BREAK, FaultKind.KILL_CONTROLLER, FaultKind.DRAIN)
    wrong = Faults(until_s=90.0, per_minute=dict.fromkeys(kinds, 1.0))
    nodes = [node.hello.node_id for node in made.nodes]
    run = FaultyRun(made, occurrences(wrong, nodes, 5), check=True)
    outcomes = run.run(burst(20.0, 90.0, 0.5))
    assert len(outcomes) == 140
    assert run.counts().faults
