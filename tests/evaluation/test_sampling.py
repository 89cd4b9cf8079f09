"""What a sampler sees by the second adds up to what nodes did."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.evaluation.series import Sampler
from mesh.sim.cluster import Arrival, CellPlan, VirtualCell
from mesh.sim.costs import NodeCosts
from mesh.sim.scenario import plan
from tests.sim.scenarios import SMALL, scenario

WORK = [Arrival(0.25, "chat-1", 200, 40), Arrival(0.5, "chat-2", 100, 30)]


@pytest.fixture
def made(tmp_path: Path) -> CellPlan:
    text = SMALL.replace('name = "cpu"\ndevice = "cpu"', 'name = "only"\ndevice = "gpu"')
    return plan(scenario(tmp_path, text.replace("count = 2", "count = 1")))


def sampled(made: CellPlan, seconds: int) -> tuple[VirtualCell, Sampler]:
    cell = VirtualCell(made)
    sampler = Sampler(cell, seconds)
    cell.run(WORK)
    cell.clock.run_until(sampler.ends_s)
    return cell, sampler


def test_seconds_add_up_to_the_nodes_own_counters(made: CellPlan) -> None:
    cell, sampler = sampled(made, 30)
    for node, series in zip(cell.nodes, sampler.series(), strict=True):
        assert len(series.used) == 30
        assert sum(series.used) == pytest.approx(node.used_s)
        assert sum(series.busy) == pytest.approx(node.busy_s)
        assert sum(series.computing) == pytest.approx(node.computing_s)
        assert sum(series.loads) == node.engine.loads
    everywhere = [sum(series.decoded_tokens) for series in sampler.series()]
    assert sum(everywhere) == sum(a.output_tokens - 1 for a in WORK)
    assert sum(sum(series.loads) for series in sampler.series()) == 2


def test_a_second_is_used_from_none_to_whole(made: CellPlan) -> None:
    _, sampler = sampled(made, 30)
    for series in sampler.series():
        for share in (*series.used, *series.busy):
            assert -1e-9 <= share <= 1 + 1e-9
        assert series.busy[-1] == pytest.approx(0.0)
        assert series.requests[-1] == 0
    busiest = max(sampler.series(), key=lambda series: sum(series.busy))
    assert busiest.busy[1] == pytest.approx(1.0, abs=0.01)
    assert max(busiest.weights_bytes) > 13e9
    assert max(busiest.kv_held_bytes) > 0
    assert max(busiest.requests) >= 1


def test_resident_weights_use_a_node_unless_costs_are_ideal(made: CellPlan) -> None:
    """They are parked at the end of the recording."""
    _, sampler = sampled(made, 30)
    for series in sampler.series():
        assert series.weights_bytes[-1] > 13e9
        assert series.used[-1] == pytest.approx(1.0)
        assert sum(series.used) > sum(series.busy) + 10.0
    ideal = tuple(replace(node, weights_use=False) for node in made.nodes)
    _, sampler = sampled(replace(made, nodes=ideal), 30)
    assert all(series.used == series.busy for series in sampler.series())


def test_a_lone_request_uses_a_node_from_its_load_to_its_last_step(made: CellPlan) -> None:
    """But for the messages that it waits for: after its load, and with the request."""
    cell = VirtualCell(replace(made, nodes=made.nodes[:1]))
    (outcome,) = cell.run([Arrival(0.3, "chat-1", 200, 40)])
    lived_s = outcome.tokens_s[-1] - outcome.arrival_s
    cell.nodes[0].look(cell.clock.now_s())
    assert cell.nodes[0].busy_s == pytest.approx(lived_s - 4 * made.link_delay_s, abs=2e-6)


def test_a_node_that_is_kept_is_busy_for_so_much_longer(made: CellPlan) -> None:
    """Two busy times that are further apart than it is kept: each counts longer by as much."""
    work = [Arrival(0.0, "chat-1", 50, 5), Arrival(10.0, "chat-1", 50, 5)]

    def busy_s(kept_s: float) -> float:
        nodes = tuple(replace(node, kept_s=kept_s) for node in made.nodes[:1])
        cell = VirtualCell(replace(made, nodes=nodes))
        sampler = Sampler(cell, 20)
        cell.run(work)
        cell.clock.run_until(sampler.ends_s)
        return sum(sampler.series()[0].busy)

    assert busy_s(1.0) == pytest.approx(busy_s(0.0) + 2.0, abs=0.1)
    assert busy_s(0.0) > 1.0, "a load of 13 GB counts"


def test_a_node_that_crashes_amid_a_load_is_in_use_no_longer(made: CellPlan) -> None:
    slow = replace(made.nodes[0], costs=NodeCosts(load_s=20.0))
    cell = VirtualCell(replace(made, nodes=(slow,)))
    (node,) = cell.nodes
    cell.clock.call_at(cell.started_s + 5.0, lambda: node.crash(silently=False))
    (outcome,) = cell.run([Arrival(0.0, "chat-1", 50, 5)])
    assert not outcome.finished
    node.look(cell.started_s + 40.0)
    assert node.used_s == node.busy_s == pytest.approx(5.0, abs=0.1)
