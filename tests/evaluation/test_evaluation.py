"""Tables and the plain record of an evaluation: ours beside others', with ratios."""

import json
from dataclasses import replace

import pytest

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.evaluation.cell_numbers import cell_numbers
from mesh.evaluation.paper.evaluation import REFERENCES, Reference, ablated, ratio, reference
from mesh.evaluation.paper.record import record
from mesh.evaluation.paper.tables import tables
from mesh.report.charts.page import Table
from mesh.report.plain import plain
from tests.evaluation.evaluated import NODES, SLO, evaluation, outcome, refused, run


def row(table: Table, policy: str) -> dict[str, str]:
    found = next(r for r in table.rows if r[1] == policy)
    return dict(zip(table.headers, found, strict=True))


def test_ours_stands_beside_theirs_with_a_ratio() -> None:
    theirs = Reference(met=4, gpu_nodes=2.5)
    met, nodes, *_ = tables(evaluation(run(reference=theirs), run(policy="sllm")))
    assert row(met, "llm-mesh") | {"REFERENCE": "4", "RATIO": "0.500"} == row(met, "llm-mesh")
    assert row(nodes, "llm-mesh")["RATIO"] == "0.500"
    assert (row(met, "sllm")["REFERENCE"], row(met, "sllm")["RATIO"]) == ("-", "-")


def test_the_figures_of_a_run_are_all_told() -> None:
    met, nodes, energy, latency, endings = tables(evaluation(run()))
    assert row(energy, "llm-mesh")["J_PER_OUTPUT_TOKEN"] == "2.000"
    assert row(energy, "llm-mesh")["IDLE_KJ"] == "-"
    assert row(met, "llm-mesh")["MET_%"] == "50.0"
    assert row(met, "llm-mesh")["EVERY_TOKEN_GRACE_%"] == "75.0"
    assert (row(nodes, "llm-mesh")["CPU_NODES"], row(nodes, "llm-mesh")["GPU_NODES"]) == (
        "0.38",
        "1.25",
    )
    assert row(latency, "llm-mesh")["STARTED_%"] == "75.0"
    assert row(latency, "llm-mesh")["TTFT_P99_S"] == "2.50"
    assert row(latency, "llm-mesh")["TPOT_P50_S"] == "0.100"
    assert row(endings, "llm-mesh")["MEMORY_FULL"] == "1"
    for table in tables(evaluation(run())):
        assert all(len(each) == len(table.headers) for each in table.rows)


def test_each_class_is_told_where_there_are_classes_and_nowhere_else() -> None:
    quick, batch = replace(SLO, name="quick"), replace(SLO, name="batch", tpot_s=1.0)
    # One token is late, and TTFT and mean TPOT are kept.
    halted = replace(outcome(slo=quick), tokens_s=(11.9, 12.3, 12.35, 12.4))
    ended = (outcome(slo=batch), replace(refused(), slo=quick), outcome(slo=quick, ttft_s=2.5))
    spec = DeploymentSpec(name=DeploymentName("f"), source="pkg://a/b", classes=(quick, batch))
    numbers = cell_numbers((*ended, halted, outcome()), NODES, specs=[spec])
    made = evaluation(replace(run(), numbers=numbers), run(cell="3B/32"))
    told = json.loads(json.dumps(plain(record(made))))["cells"]
    assert "by_class" not in told["3B/32"]["llm-mesh"]
    assert told["7B/64"]["llm-mesh"]["by_class"] == {
        "quick": {"requests": 3, "met": 1, "met_every_token": 0, "refused": {"memory_full": 1}},
        "batch": {"requests": 1, "met": 1, "met_every_token": 1, "refused": {}},
    }
    (table,) = [table for table in tables(made) if table.title == "SLO met, by class"]
    assert table.rows == (
        ("7B/64", "llm-mesh", "quick", "3", "1", "33.3", "0.0", "1"),
        ("7B/64", "llm-mesh", "batch", "1", "1", "100.0", "100.0", "0"),
    )


def test_ablations_stand_beside_the_whole_in_the_same_cell() -> None:
    part = run(policy="llm-mesh-no-cpu", reference=Reference(gpu_nodes=3.5))
    elsewhere = run(cell="3B/32", policy="llm-mesh-no-cpu")
    made = evaluation(run(), part, elsewhere)
    assert [(a.cell, b.policy) for a, b in ablated(made.runs)] == [("7B/64", "llm-mesh")]
    table = tables(made)[-1]
    assert table.title == "Ablations"
    assert table.rows == (("7B/64", "llm-mesh-no-cpu", "2", "+0", "-", "1.25", "+0.00", "3.50"),)


def test_a_record_is_cell_then_policy_then_numbers() -> None:
    made = json.loads(json.dumps(plain(record(evaluation(run(), run(policy="sllm+cpu"))))))
    assert list(made["cells"]) == ["7B/64"]
    assert list(made["cells"]["7B/64"]) == ["llm-mesh", "sllm+cpu"]
    numbers = made["cells"]["7B/64"]["llm-mesh"]
    assert numbers["met"] == 2
    assert numbers["refused"] == {"memory_full": 1}
    assert numbers["gpu_nodes"] == 1.25
    assert len(numbers["ttft_percentiles_s"]) == 101
    assert numbers["reference"]["met_ratio"] is None


def test_a_reference_holds_for_its_own_load_only() -> None:
    assert reference("7B/128", 128, "llm-mesh", 9266).met == 7877
    assert reference("7B/128", 128, "llm-mesh", 9265) == Reference()
    assert reference("7B/128", 128, "fcfs", 9266) == Reference()
    assert len(REFERENCES) == 9 * 4 + 4


@pytest.mark.parametrize(("theirs", "expected"), [(None, None), (0.0, None), (0.5, 4.0)])
def test_a_ratio_needs_something_to_divide_by(theirs: float | None, expected: float | None) -> None:
    assert ratio(2.0, theirs) == expected
