"""The cells of the evaluation: what they are made of, and that a run follows from its load."""

from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.reasons import DeviceKind
from mesh.evaluation.paper.cells import (
    ALL_CELLS,
    from_trace,
    generated,
    load,
    paper_case,
    plan,
    run,
)
from mesh.sim.cell_costs import IDEAL, MEASURED, CellCosts
from mesh.sim.testbed import known_model
from mesh_workloads.trace import Trace

LOOSE = "0.25:0.5,1.0:0.5"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generated(1)


def test_other_lengths_keep_the_arrivals_and_fit_into_the_context(trace: Trace) -> None:
    other = generated(1, "short-answers")
    assert [(a.t_s, a.function) for a in other.arrivals] == [
        (a.t_s, a.function) for a in trace.arrivals
    ]
    assert {a.output_tokens for a in other.arrivals} == set(range(40, 91))
    assert max(a.input_tokens + a.output_tokens for a in other.arrivals) <= 4096


def test_there_are_nine_cells() -> None:
    assert [cell.name for cell in ALL_CELLS] == [
        f"{model}/{n}" for model in ("3B", "7B", "13B") for n in (32, 64, 128)
    ]
    assert paper_case("7B/128").functions == 128
    with pytest.raises(InvalidInput, match="7B/16") as raised:
        paper_case("7B/16")
    assert "7B/128" in raised.value.hint


@pytest.mark.parametrize("cell", ALL_CELLS, ids=lambda cell: str(cell.name))
def test_a_cell_has_a_deployment_for_each_function_and_eight_nodes(cell: object) -> None:
    chosen = next(c for c in ALL_CELLS if c is cell)
    made = plan(chosen, "llm-mesh")
    assert len(made.deployments) == len({d.spec.name for d in made.deployments})
    assert len(made.deployments) == chosen.functions
    devices = [node.hello.device for node in made.nodes]
    assert devices == [DeviceKind.CPU] * 4 + [DeviceKind.GPU] * 4
    assert {d.context_tokens_max for d in made.deployments} == {4096}


def test_a_model_is_resident_on_a_cpu_and_copied_to_a_gpu() -> None:
    cpu, *_, gpu = plan(paper_case("7B/32"), "llm-mesh").nodes
    assert cpu.costs.load_time_s(13_000_000_000) == 0.0
    assert gpu.costs.load_time_s(13_000_000_000) == pytest.approx(0.2 + 0.65)


@pytest.mark.parametrize("costs", [MEASURED, IDEAL])
def test_no_node_copies_a_cache_that_grows(costs: CellCosts) -> None:
    for node in plan(paper_case("13B/32"), "llm-mesh", costs).nodes:
        by_a_gb_s = node.costs.resize_time_s(8_000_000_000, 9_000_000_000)
        again_s = node.costs.resize_time_s(80_000_000_000, 81_000_000_000)
        assert by_a_gb_s == pytest.approx(again_s)
        assert by_a_gb_s < 0.05


def test_memory_is_set_aside_for_each_engine_or_for_a_fixed_number_of_them() -> None:
    own_bytes = known_model("llama-2-13b").info.disk_bytes
    for costs, gpu_bytes, weights_bytes in (
        (IDEAL, 75 << 30, own_bytes),
        (MEASURED, 78 << 30, own_bytes + (3 << 29)),
    ):
        made = plan(paper_case("13B/32"), "llm-mesh", costs)
        assert made.nodes[-1].hello.memory_bytes == gpu_bytes
        (known,) = {costs.footprint for costs in made.nodes[-1].models.values()} & {
            footprint for _, footprint in made.deployments[0].footprints
        }
        assert known.instance_bytes(0) == weights_bytes


def test_loads_are_nested_and_every_request_has_its_deployment(trace: Trace) -> None:
    small, middle, whole = (load(trace, n, 300.0).arrivals for n in (32, 64, 128))
    assert set(small) < set(middle) < set(whole)
    assert all(arrival.t_s < 300.0 for arrival in whole)
    names = {d.spec.name for d in plan(paper_case("3B/32"), "llm-mesh").deployments}
    assert {f"function-{a.function:03d}" for a in small} <= names


def test_of_a_trace_that_numbers_no_functions_128_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    minutes = ",".join(str(minute) for minute in range(1, 61))
    rows = (f"o,a,f{n},http,{',1' * 60}\n".replace(",,", ",") for n in range(150))
    path.write_text(f"HashOwner,HashApp,HashFunction,Trigger,{minutes}\n" + "".join(rows))
    found = from_trace(path, seed=1)
    assert (found.name, found.duration_s) == ("azure", 1800.0)
    assert {arrival.function for arrival in found.arrivals} == set(range(128))
    assert from_trace(path, seed=1) == found != from_trace(path, seed=2)
    assert len(load(found, 32, 60.0).arrivals) == 32


def test_a_load_without_requests_cannot_be_meant(trace: Trace) -> None:
    with pytest.raises(InvalidInput, match="no arrivals"):
        load(trace, 32, 1e-6)


def test_a_run_follows_from_its_load(trace: Trace) -> None:
    cell = paper_case("3B/32")
    work = load(trace, cell.functions, 5.0)
    first, again = (run(cell, "llm-mesh", work) for _ in range(2))
    assert first == again
    numbers = first.numbers
    assert numbers.requests == len(work.arrivals) > 5
    assert numbers.met <= numbers.met_with_grace <= numbers.finished
    assert 0 < numbers.cpu_nodes <= 4
    assert all(len(node.used) == 5 for node in first.nodes)
    assert run(cell, "fcfs", work).numbers != numbers


def test_requests_are_measured_by_the_class_that_they_draw(trace: Trace) -> None:
    cell = paper_case("3B/32")
    work = load(trace, cell.functions, 5.0)
    assert {
        str(made.spec.class_default) for made in plan(cell, "fcfs", slo_mix=LOOSE).deployments
    } == {"tpot-250ms"}
    loose, strict = (run(cell, "fcfs", work, slo_mix=mix).numbers for mix in (LOOSE, "0.001:1.0"))
    assert strict.met < loose.met <= loose.requests == len(work.arrivals)
