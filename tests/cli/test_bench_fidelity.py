"""`mesh bench fidelity`: what it shows of a run."""

import json
from pathlib import Path
from unittest import mock

import pytest

from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.evaluation.fidelity.report import LiveRun
from mesh.sim.costs import NodeCosts
from mesh.sim.scenario import plan
from tests.cli.running import Ran, mesh
from tests.evaluation.fidelity.living import SCENARIO, arrivals, live
from tests.sim.scenarios import scenario


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    made = plan(scenario(tmp_path_factory.mktemp("fidelity"), SCENARIO))
    return live(made, NodeCosts(factor=1.2), arrivals(60, 0.8), calibrated_s=24.0)


def fidelity(run: LiveRun, home: Path, *arguments: str) -> Ran:
    with mock.patch("mesh.cli.bench_fidelity.LiveSide") as side:
        side.return_value.run.return_value = run
        return mesh("bench", "fidelity", "--home", str(home), "--simulations", "1", *arguments)


def test_both_sides_stand_beside_each_other(run: LiveRun, tmp_path: Path) -> None:
    ran = fidelity(run, tmp_path)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].split()[:3] == ["FIGURE", "LIVE", "SIMULATED"]
    assert [line.split("  ")[0] for line in lines[1:4]] == [
        "TPOT mean, ms",
        "end to end mean, s",
        "TTFT p95, s",
    ]
    assert "calibrated by the first" in ran.out


def test_json_has_the_errors_and_both_sides_of_what_is_counted(
    run: LiveRun, tmp_path: Path
) -> None:
    made = json.loads(fidelity(run, tmp_path, "-o", "json").out)
    assert made["requests"] == sum(a.at_s >= 24.0 for a in run.arrivals)
    for figures in (made, made["at_live_pace"]):
        assert 0.0 <= figures["tpot_error"] < 0.05
        assert 0.0 <= figures["e2e_error"] < 0.05
        assert 0.0 <= figures["ttft_p95_error"] < 0.2
        assert set(figures["refused"]) == set(figures["met"]) == {"live", "simulated"}
    assert made["costs"]["factor"] == pytest.approx(1.2, rel=0.02)


def test_the_command_is_listed_and_its_numbers_are_checked() -> None:
    assert "fidelity" in mesh("bench", "--help").out
    assert mesh("bench", "fidelity", "--seconds", "0").code == 2
    assert mesh("bench", "nothing").code == 2


def test_nodes_write_journals_when_they_are_to(tmp_path: Path) -> None:
    made = CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=plan_nodes(["cpu"]))
    assert made.node_journal("cpu0") is None
    kept = CellPlan(
        listen="127.0.0.1:0", home=tmp_path, nodes=plan_nodes(["cpu"]), node_journals=tmp_path
    )
    assert kept.node_journal("cpu0") == tmp_path / "cpu0.journal"
