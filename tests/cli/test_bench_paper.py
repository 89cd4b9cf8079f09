"""`mesh bench`: its numbers, its files and its failures."""

import json
import sys
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.verbs import bench
from mesh.domain.errors import MeshError
from mesh.evaluation.fidelity.report import LiveRun
from mesh.evaluation.paper.cells import PaperCase, PaperJob, PaperRun, generated, load, paper_case
from mesh.evaluation.paper.cells import run as paper_run
from mesh.evaluation.runs import run_all
from mesh.sim.cell_costs import IDEAL, MEASURED, CellCosts
from mesh.sim.costs import NodeCosts
from mesh.sim.scenario import plan
from mesh_workloads.formats import write
from mesh_workloads.generating import LLM_MESH, generate
from mesh_workloads.trace import Trace
from tests.cli.running import Ran, mesh
from tests.evaluation.fidelity.living import SCENARIO, arrivals, live
from tests.sim.scenarios import scenario

SHORT = ("--duration", "1", "--jobs", "1")


def paper(*arguments: str) -> Ran:
    return mesh("bench", "paper", *SHORT, *arguments)


def test_the_group_lists_its_measurements() -> None:
    for ran in (mesh("bench", "--help"), mesh("bench")):
        assert ran.code == 0
        assert all(name in ran.out for name in bench.Benches.verbs)
        assert ran.err == ""
    assert mesh("bench", "best").code == 2


def test_json_is_cell_then_policy_then_numbers() -> None:
    ran = paper("--cells", "3B/32, 7B/32", "--policy", "fcfs", "--policy", "llm-mesh", "-o", "json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert made["duration_s"] == 1.0
    assert made["workload"] == "generated (llm-mesh, seed 1), costs as measured"
    assert {cell: list(policies) for cell, policies in made["cells"].items()} == {
        "3B/32": ["fcfs", "llm-mesh"],
        "7B/32": ["fcfs", "llm-mesh"],
    }
    numbers = made["cells"]["7B/32"]["llm-mesh"]
    wanted = {"requests", "met", "met_every_token", "cpu_nodes", "gpu_nodes", "seconds", "refused"}
    assert wanted <= set(numbers)
    assert 0 < numbers["met"] <= numbers["requests"]
    assert numbers["reference"]["met"] is None, "nobody measured a generated load"


def test_the_generated_load_may_have_other_lengths_and_a_trace_has_its_own(tmp_path: Path) -> None:
    asked = ("--cells", "3B/32", "--policy", "llm-mesh", "--lengths", "short-answers")
    made = json.loads(paper(*asked, "-o", "json").out)
    assert made["workload"] == "generated (llm-mesh, short-answers, seed 1), costs as measured"
    path = tmp_path / "small.csv"
    path.write_text("t_s,function,input_tokens,output_tokens\n0.1,0,10,20\n")
    ran = paper(*asked, "--trace", str(path))
    assert ran.code != 0
    assert "small.csv" in ran.err


def test_a_trace_is_read_and_side_by_side_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    with path.open("w") as file:
        write(generate(LLM_MESH, 5), file)
    asked = ["bench", "paper", "--trace", str(path), "--cells", "3B/32,3B/64", "-o", "json"]
    asked += ["--policy", "llm-mesh", "--duration", "1", "--jobs"]
    single, both = (json.loads(mesh(*asked, jobs).out) for jobs in ("1", "2"))
    generated = ("--cells", "3B/32", "--policy", "llm-mesh", "-o", "json")
    other = json.loads(paper(*generated).out)
    assert single["workload"] == "trace small.csv, costs as measured"
    for made in (single, both, other):
        for policies in made["cells"].values():
            assert policies["llm-mesh"].pop("seconds") > 0
    assert single == both
    assert other["cells"]["3B/32"]["llm-mesh"] != single["cells"]["3B/32"]["llm-mesh"]


def test_tables_page_and_plots_are_written(tmp_path: Path) -> None:
    page, plots = tmp_path / "paper.html", tmp_path / "plots"
    asked = ("--cells", "7B/32", "--policy", "llm-mesh")
    ran = paper(*asked, "--ablations", "--html", str(page))
    assert ran.code == 0, ran.err
    for title in ("SLO met", "Nodes in use", "TTFT and TPOT", "Cold starts", "Ablations"):
        assert title in ran.out
    assert "llm-mesh-no-cpu" in ran.out
    assert "load: generated" in ran.err
    assert page.read_text().startswith("<!doctype html>")
    assert paper(*asked, "--plots", str(plots)).code == 0
    assert len(list(plots.glob("*.png"))) == 3 + 6 + 3


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--policy", "best"), 2, "best"),
        (("--cells", "7B/16"), 2, "7B/16"),
        (("--trace", "absent.csv"), 1, "absent.csv"),
        (("--duration", "0"), 2, "duration"),
        (("--html", "absent/paper.html"), 2, "absent"),
    ],
)
def test_failures_are_two_lines(arguments: tuple[str, ...], code: int, named: str) -> None:
    ran = paper(*arguments)
    assert ran.code == code
    assert named in ran.error_lines[0]


def test_plots_without_matplotlib_fail_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = paper("--plots", str(tmp_path / "plots"))
    assert (ran.code, ran.error_lines) == (
        1,
        ("--plots needs matplotlib, which is not installed", "pip install 'mesh-serve[plot]'"),
    )


def test_a_folder_for_plots_that_cannot_be_made_is_told_before_anything_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    ran = paper("--cells", "3B/32", "--policy", "llm-mesh", "--plots", str(tmp_path / "file/plots"))
    assert (ran.code, ran.out) == (1, "")
    assert ran.error_lines[0] == f"{tmp_path}/file/plots: Not a directory"


@pytest.mark.parametrize(
    ("arguments", "costs", "words"),
    [
        ((), MEASURED, "costs as measured"),
        (("--ideal",), IDEAL, "ideal costs"),
        (("--slo-mix", "0.25:1.0"), MEASURED, "costs as measured, SLO classes 0.25:1.0"),
    ],
)
def test_costs_reach_the_run_and_are_told(
    arguments: tuple[str, ...],
    costs: CellCosts,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []

    def run(cell: PaperCase, policy: str, work: Trace, **given: Any) -> PaperRun:
        told.append(given)
        return paper_run(cell, policy, work, **given)

    monkeypatch.setattr("mesh.evaluation.paper.cells.run", run)
    ran = paper("--cells", "3B/32", "--policy", "llm-mesh", "-o", "json", *arguments)
    slo_mix = arguments[1] if "--slo-mix" in arguments else ""
    assert told == [{"costs": costs, "check_refusals": False, "slo_mix": slo_mix}]
    assert json.loads(ran.out)["workload"] == f"generated (llm-mesh, seed 1), {words}"


def test_refusals_are_checked_when_asked(tmp_path: Path) -> None:
    page = tmp_path / "paper.html"
    asked = ("--cells", "13B/128", "--policy", "llm-mesh", "--duration", "10", "--check-refusals")
    made = json.loads(paper(*asked, "-o", "json", "--html", str(page)).out)
    numbers = made["cells"]["13B/128"]["llm-mesh"]
    assert 0 <= numbers["refused_beside_free_link"] <= numbers["requests"] - numbers["met"]
    assert 0 < numbers["refusal_reasons_drawn"] <= sum(numbers["refused"].values())
    assert "Refusals, checked" in page.read_text()


def test_a_run_that_fails_leaves_the_others_and_fails_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(cell: PaperCase, policy: str, work: Trace, **given: Any) -> PaperRun:
        if cell.functions == 64:
            raise MeshError("requests hang", hint="look at them")
        return paper_run(cell, policy, work, **given)

    monkeypatch.setattr("mesh.evaluation.paper.cells.run", run)
    ran = paper("--cells", "3B/32,3B/64", "--policy", "llm-mesh", "-o", "json")
    assert ran.code == 1
    assert list(json.loads(ran.out)["cells"]) == ["3B/32"]
    assert "error: 1 of 2 runs failed; 3B/64 llm-mesh: requests hang" in ran.err
    assert "hint: `mesh --traceback bench paper --cells 3B/64 --policy llm-mesh`" in ran.err


def test_the_only_run_fails_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> PaperRun:
        raise MeshError("requests hang", hint="look at them")

    monkeypatch.setattr("mesh.evaluation.paper.cells.run", run)
    ran = paper("--cells", "3B/32", "--policy", "llm-mesh")
    assert ran.code == 1
    assert ran.err.endswith("error: requests hang\nhint: look at them\n")


@pytest.mark.timeout(60)
def test_ctrl_c_does_not_wait_for_what_is_still_computed() -> None:
    """The short run ends first; the other would take minutes."""
    cell = paper_case("7B/128")
    trace = generated(1)
    jobs = [
        PaperJob(cell=cell, policy=name, work=load(trace, cell.functions, seconds))
        for name, seconds in (("llm-mesh", 1800.0), ("fcfs", 0.5))
    ]

    def stop(phase: str, share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(jobs, 2, stop)
    assert not active_children()


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


def test_json_has_the_errors_and_both_sides_of_counts(run: LiveRun, tmp_path: Path) -> None:
    made = json.loads(fidelity(run, tmp_path, "-o", "json").out)
    assert made["requests"] == sum(a.at_s >= 24.0 for a in run.arrivals)
    for figures in (made, made["at_live_pace"]):
        assert 0.0 <= figures["tpot_error"] < 0.05
        assert 0.0 <= figures["e2e_error"] < 0.05
        assert 0.0 <= figures["ttft_p95_error"] < 0.2
        assert set(figures["refused"]) == set(figures["met"]) == {"live", "simulated"}
    assert made["costs"]["factor"] == pytest.approx(1.2, rel=0.02)


def test_nodes_write_journals_when_they_are_to(tmp_path: Path) -> None:
    made = CellPlan(listen="127.0.0.1:0", home=tmp_path, nodes=plan_nodes(["cpu"]))
    assert made.node_journal("cpu0") is None
    kept = CellPlan(
        listen="127.0.0.1:0", home=tmp_path, nodes=plan_nodes(["cpu"]), node_journals=tmp_path
    )
    assert kept.node_journal("cpu0") == tmp_path / "cpu0.journal"
