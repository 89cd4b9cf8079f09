"""The simulator's benchmark runs what it says, and measures a process of its own."""

from pathlib import Path

import pytest

from bench.sim import DEPLOYMENTS, NODES, Case, figures, measure, row, scenario_of
from mesh.domain.reasons import DeviceKind
from mesh.sim.scenario import arrivals
from mesh_workloads.generating import LLM_MESH


def test_the_load_is_that_of_llm_mesh() -> None:
    case = Case()
    scenario = scenario_of(case)
    coming = list(arrivals(scenario))
    assert len(coming) == pytest.approx(9266, rel=0.2)
    assert len({arrival.deployment for arrival in coming}) > 0.8 * DEPLOYMENTS
    assert coming[-1].at_s == pytest.approx(LLM_MESH.duration_s, rel=0.05)


def test_larger_cells_are_copies_with_as_many_requests() -> None:
    case = Case(nodes=10 * NODES)
    scenario = scenario_of(case)
    assert {group.device: group.count for group in scenario.nodes} == {
        DeviceKind.CPU: 5 * NODES,
        DeviceKind.GPU: 5 * NODES,
    }
    assert sum(group.count for group in scenario.deployments) == 10 * DEPLOYMENTS
    coming = list(arrivals(scenario))
    assert len(coming) == pytest.approx(9266, rel=0.2)
    assert coming[-1].at_s == pytest.approx(LLM_MESH.duration_s / 10, rel=0.05)


def test_a_trace_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("t_s,function,input_tokens,output_tokens\n0.5,3,100,7\n1.5,0,20,2\n")
    case = Case(trace=file)
    assert [(a.at_s, a.deployment, a.output_tokens) for a in arrivals(scenario_of(case))] == [
        (0.5, "chat-0-4", 7),
        (1.5, "chat-0-1", 2),
    ]


def test_what_is_measured_ends_in_the_figures() -> None:
    case = Case(short=20)
    found = measure(case)
    assert found.requests > 0
    assert found.requests <= found.tokens <= 2 * found.requests
    assert found.rss_mb > 10.0
    result = figures([("", Case(), found), ("requests", case, found)])
    assert result["seconds"] == round(found.seconds, 2)
    assert result["request_us_by_requests"] == {"20": round(found.request_us, 1)}
    assert result["growth"] == [row(Case(), found), row(case, found)]
    assert row(case, found)["requests"] == found.requests
