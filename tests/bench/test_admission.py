"""The cell on paper is what the admission benchmark says it is, before and after a decision."""

import pytest

from bench.admission import (
    NODES,
    ROUND,
    TARGETS,
    Overload,
    Scenario,
    Times,
    figures,
    measure,
    ratios,
    scenarios,
)
from bench.admission_cell import (
    BATCH,
    DEPLOYMENTS,
    NOW_S,
    TIER_BATCH,
    TIERS_S,
    PaperCell,
    TierCell,
    placement,
)
from bench.harness import Report
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


@pytest.mark.parametrize("rule", ["polyserve-co", "mesh-slo"])
def test_all_servers_of_a_tier_but_one_are_full_before_and_after_a_decision(rule: str) -> None:
    cell = TierCell(rule=rule, servers=2 * len(TIERS_S))
    batches = {str(of): i.batch for of, i in cell.core.cell.instances.items()}
    assert len(batches) == 2 * len(TIERS_S)
    assert {of: n for of, n in batches.items() if n == TIER_BATCH}.keys() >= {
        f"tier-{of}-0000" for of in range(len(TIERS_S))
    }
    for _ in range(8):
        event = cell.invoked()
        placed = placement(event.request, cell.core.handle(event, NOW_S))
        assert placed is not None
        assert placed.instance_id.endswith("-0000")
        cell.forget(event.request, placed)
        cell.check()


def test_as_many_decisions_are_timed_as_asked_for() -> None:
    times = measure(Scenario(nodes=2, busy=1), 20, 2, 1, lambda line: None)
    assert len(times.taken_ns) == 20


def test_all_that_wait_in_overload_still_wait_after_each_round() -> None:
    overload, times = Overload(nodes=2, unloaded=5, seed=1), Times()
    overload.check()
    overload.decide(7, times)
    overload.check()
    assert len(times.taken_ns) == 7 * ROUND


def test_a_checkout_without_overload_is_compared_by_the_other_figures() -> None:
    ours = {"decisions_per_cpu_s": {"1": 300, "10": 200}, "decisions_per_cpu_s_overload": 50}
    assert ratios(ours, {"decisions_per_cpu_s": {"1": 200}}) == {"ratio": {"1": 1.5}}
    theirs = {"decisions_per_cpu_s": {"10": 100}, "decisions_per_cpu_s_overload": 25}
    assert ratios(ours, theirs) == {"ratio": {"10": 2.0}, "overload_ratio": 2.0}


def test_each_policy_with_tiers_has_to_be_as_quick_as_polyserve() -> None:
    """Decisions of 100 µs, but for two of 2.5 ms in a hundred, or all of 300 µs."""
    quick, stalls, slow = (
        Times(taken_ns=taken_ns, computed_ns=1)
        for taken_ns in ([100_000] * 100, [100_000] * 98 + [2_500_000] * 2, [300_000] * 100)
    )
    for of_tiers, missed in (
        ((quick, quick), []),
        ((quick, stalls), ["decision_us_p99_tiers"]),
        ((slow, quick), ["decisions_per_s_tiers"]),
    ):
        tiers = iter(of_tiers)
        measured = [(of, next(tiers) if of.tiers else slow) for of in scenarios(NODES)]
        report = Report(figures=figures(measured, slow), targets=TARGETS)
        assert [words.split()[0] for words in report.missed()] == missed


def test_rates_and_percentiles_are_those_of_the_times() -> None:
    times = Times(taken_ns=[1_000_000] * 98 + [51_000_000] * 2)
    assert times.decisions_per_s == pytest.approx(500.0)
    assert times.p50_us == 1000.0
    assert times.p99_us == 51_000.0
