"""The cell on paper is what the admission benchmark says it is, before and after a decision."""

import pytest

from bench.admission.cell import NOW_S, PaperCell, placement
from bench.admission.deciding import Scenario, Times, measure
from bench.admission.setting import BATCH, DEPLOYMENTS
from mesh.domain.events import InvokeRequested


def test_every_instance_of_every_node_runs_a_full_batch() -> None:
    cell = PaperCell(nodes=3, busy=1)
    cell.check()
    instances = cell.core.cell.instances
    assert len(instances) == 3 * DEPLOYMENTS
    assert {instance.batch for instance in instances.values()} == {BATCH}


def test_busy_nodes_are_tried_first_and_take_nothing() -> None:
    cell = PaperCell(nodes=4, busy=3)
    request = cell.request()
    placed = placement(request, cell.core.handle(InvokeRequested(request=request), NOW_S))
    assert placed is not None
    assert placed.link_id == 3
    assert placed.instance_id.endswith("-0003")


@pytest.mark.parametrize("busy", [0, 2])
def test_a_decision_that_is_undone_leaves_the_cell_as_it_was(busy: int) -> None:
    cell = PaperCell(nodes=2, busy=busy)
    for _ in range(3):
        request = cell.request()
        actions = cell.core.handle(InvokeRequested(request=request), NOW_S)
        placed = placement(request, actions)
        assert (placed is None) == (busy == 2)
        cell.forget(request, placed)
        cell.check()


def test_as_many_decisions_are_timed_as_asked_for() -> None:
    times = measure(Scenario(nodes=2, busy=1), 20, 2, 1, lambda line: None)
    assert len(times.taken_ns) == 20


def test_rates_and_percentiles_are_those_of_the_times() -> None:
    times = Times(taken_ns=[1_000_000] * 98 + [51_000_000] * 2)
    assert times.decisions_per_s == pytest.approx(500.0)
    assert times.p50_us == 1000.0
    assert times.p99_us == 51_000.0
