"""The evaluation of operator-level autoscaling: its points, a small one whole, its figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh.cli.main import mesh
from mesh.domain.errors import InvalidInput
from mesh.domain.operators import Phase
from mesh.evaluation.operator_page import page
from mesh.evaluation.operators import (
    CONSERVING,
    PAPER,
    PLANNERS,
    Point,
    PointJob,
    _Executions,
    _most,
    oracle,
    points,
    record,
    throughput_gain,
)
from mesh.plan import conserving
from mesh.plan.conserving import Placed
from mesh.plan.planners import plan_model
from mesh.plan.problem import Problem

SMALL = Point(figure="qps", name="10", rate_per_s=10.0, lengths=(1024,))


def test_points_are_those_of_the_papers_figures() -> None:
    every = points()
    assert {point.figure.split()[0] for point in every} == {
        *("length", "qps", "phase", "size", "slo")
    }
    longest = next(of for of in every if of.figure == "length qwen2-7b" and of.name == "65536")
    assert longest.rate_per_s < 1.0
    sizes = [of.problem().slo_s for of in every if of.figure == "size"]
    assert len(set(sizes)) == 1, "all sizes have one SLO"
    decodes = [of for of in every if of.phase is Phase.DECODE]
    assert [of.name.split()[0] for of in decodes] == [
        *("azure-conversation", "azure-code", "mooncake-conversation")
    ]
    assert len(points(quick=True)) < len(every)
    faster = points(device="h100")
    assert {point.device for point in faster} == {"h100"}
    assert faster[-1].problem().slo_s < every[-1].problem().slo_s / 2


def test_a_point_is_planned_and_executed_in_both_ways() -> None:
    job = PointJob(point=SMALL, requests=150)
    made = job.compute()
    assert list(made) == [PAPER, CONSERVING]
    assert all(tuple(by) == PLANNERS for by in made.values())
    conserving = made[CONSERVING]
    assert conserving["operators"].devices <= conserving["model-shared"].devices
    assert conserving["model-shared"].devices <= conserving["model"].devices
    assert conserving["operators"].memory_bytes <= conserving["model-shared"].memory_bytes
    html = page({SMALL: made})
    assert html.count("<svg") == 4
    assert "operators, conserving" in html
    figures = json.loads(json.dumps(record({SMALL: made})))
    cell = figures["cells"]["qps"]["10"]["conserving"]["model"]
    assert cell["devices"] == conserving["model"].devices
    assert cell["ttft_met"] >= 0.95
    assert figures["saving_conserving_max"]["model"] >= 0


def test_the_devices_of_whole_models_serve_more_by_the_papers_formulas() -> None:
    point = replace(SMALL, rate_per_s=40.0, lengths=(2048,))
    assert throughput_gain(point) > 1.3


def test_the_largest_rate_is_found_though_devices_fall_with_it() -> None:
    """A plan needs 3 devices from 15 to 20 a second, and 2 from 20 to 30."""
    problem = SMALL.problem()

    def planned(at: Problem) -> Placed:
        rate = at.rate_per_s
        if rate > 30:
            raise InvalidInput("too much")
        placement = (tuple(range(3 if 15 < rate < 20 else 2)),)
        return Placed(plan=plan_model(problem), placement=placement, expected_s=0.1)

    assert _most(problem, 2, planned) == pytest.approx(30, rel=0.02)
    assert _most(problem, 1, planned) == SMALL.rate_per_s


def test_all_planners_are_tried_alike_and_trials_are_no_planning() -> None:
    run = _Executions(problem=SMALL.problem(), requests=150)
    kept, plan_s = run.first_kept(conserving.models(run.problem, 1))
    assert plan_s < 1
    assert {one.requests for one in run.known.values() if one.met >= 0.99} == {165}
    again, _ = run.first_kept(iter([kept]))
    assert again is kept
    with pytest.raises(InvalidInput, match="no plan keeps"):
        run.first_kept(iter([]))


def test_the_exact_planner_is_the_oracle() -> None:
    tested = oracle((10, 40))
    assert tested["oracle_enumerated"] >= 2
    assert tested["oracle_gave_up"] < 4
    assert tested["oracle_gap"] == 0
    assert tested["oracle_gap_greedy"] >= 0
    assert tested["plan_ms_p99"] <= 50


def test_a_trace_gives_lengths_and_rate(tmp_path: Path) -> None:
    trace = tmp_path / "calls.csv"
    rows = "".join(f"{number / 2},0,{100 + number},20\n" for number in range(100))
    trace.write_text("t_s,function,input_tokens,output_tokens\n" + rows)
    prompts, tokens = points(trace)
    assert prompts.rate_per_s == pytest.approx(2.0, rel=0.03)
    assert tokens.rate_per_s == pytest.approx(40.0, rel=0.03)
    assert min(prompts.lengths) == 103
    assert max(prompts.lengths) == 196


def test_a_trace_without_lengths_and_an_unknown_figure_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "counts.csv"
    minutes = ",".join(str(minute) for minute in range(1, 1441))
    trace.write_text(f"HashOwner,HashApp,HashFunction,Trigger,{minutes}\n")
    with pytest.raises(InvalidInput, match="has no lengths of prompts"):
        points(trace)
    said = CliRunner().invoke(mesh, ["bench", "operators", "--figures", "none"])
    assert said.exit_code == 2
