"""A run in numbers: what is met by which rule, means over time, percentiles, ranks."""

from dataclasses import replace
from itertools import pairwise

import pytest

from mesh.domain.reasons import DeviceKind
from mesh.evaluation.cell_numbers import ServedShares, by_rank, cell_numbers, served_shares
from mesh.evaluation.series import binned, nodes_in_use
from mesh.report.distribution import Distribution
from tests.evaluation.evaluated import NODES, OUTCOMES, outcome, refused


def test_a_run_is_counted_by_each_rule() -> None:
    made = cell_numbers(OUTCOMES, NODES)
    assert (made.requests, made.finished) == (4, 3)
    assert (made.met, made.met_with_grace) == (2, 3)
    assert (made.met_every_token, made.met_every_token_with_grace) == (2, 3)
    assert made.refused == (("memory_full", 1),)
    assert (made.loads, made.cold_requests) == (3, 1)


def test_one_late_token_is_missed_by_every_token_but_not_in_the_mean() -> None:
    late = replace(outcome(tokens=40), tokens_s=(10.1, *(14.0 + 0.01 * n for n in range(39))))
    made = cell_numbers([late], NODES)
    assert (made.met, made.met_every_token) == (1, 0)


def test_a_steady_pace_above_the_slo_may_keep_every_deadline_but_not_the_mean() -> None:
    """An early first token leaves time that later tokens may use up."""
    slow = replace(outcome(), tokens_s=tuple(10.1 + 0.3 * n for n in range(5)))
    made = cell_numbers([slow], NODES)
    assert (made.met, made.met_every_token) == (0, 1)


def test_nodes_in_use_are_means_over_time_by_device() -> None:
    made = cell_numbers(OUTCOMES, NODES)
    assert made.cpu_nodes == pytest.approx(1.5 / 4)
    assert made.gpu_nodes == pytest.approx(5 / 4)
    assert nodes_in_use(NODES, DeviceKind.GPU) == (1.0, 1.0, 1.0, 2.0)
    assert dict(made.decode_tokens_per_s) == {"cpu": 30.0, "gpu": 90.0}


def test_nodes_that_only_hold_weights_are_in_use_and_not_busy() -> None:
    resident = replace(NODES[2], used=(1.0,) * 4)
    made = cell_numbers(OUTCOMES, [*NODES[:2], resident])
    assert made.gpu_nodes == 2.0
    assert made.gpu_nodes_busy == pytest.approx(5 / 4)
    assert dict(made.decode_tokens_per_s)["gpu"] == 90.0


def test_a_device_that_was_never_used_has_no_throughput() -> None:
    idle = [replace(NODES[0], busy=(0.0,) * 4), NODES[1]]
    assert [device for device, _ in cell_numbers(OUTCOMES, idle).decode_tokens_per_s] == ["gpu"]


def test_nothing_at_all_has_numbers_too() -> None:
    made = cell_numbers([], [])
    assert (made.requests, made.met, made.gpu_nodes, made.by_rank) == (0, 0, 0.0, ())
    assert made.ttft.at(50) is None


def test_percentiles_are_nearest_ranks() -> None:
    made = Distribution.of(reversed([float(n) for n in range(1, 201)]))
    assert [made.at(p) for p in (0, 1, 50, 99, 100)] == [1.0, 2.0, 100.0, 198.0, 200.0]
    assert Distribution.of([7.0]).at(99) == 7.0


def test_a_curve_ends_below_one_by_those_without_a_value() -> None:
    curve = Distribution.of([1.0, 2.0]).curve(of=4)
    assert (curve[0], curve[50], curve[-1]) == ((1.0, 0.0), (1.0, 0.25), (2.0, 0.5))
    assert [share for _, share in curve] == sorted(share for _, share in curve)


def test_functions_are_ranked_by_requests_and_grouped() -> None:
    few = by_rank([*(outcome("busy") for _ in range(3)), refused("rare"), outcome("alike")])
    assert [(g.first_rank, g.last_rank, g.requests, g.met) for g in few] == [
        (1, 1, 3, 3),
        (2, 2, 1, 1),
        (3, 3, 1, 0),
    ]
    assert few[2].not_finished == 1
    (late,) = by_rank([outcome("cold", ttft_s=2.5, grace_s=1.0)])
    assert (late.met, late.cold_requests) == (0, 1), "a load counts"
    many = by_rank([outcome(f"f-{n:02d}") for n in range(40) for _ in range(40 - n)])
    assert len(many) == 16
    assert many[0].first_rank == 1
    assert many[-1].last_rank == 40
    assert sum(g.requests for g in many) == sum(range(1, 41))
    assert all(a.last_rank + 1 == b.first_rank for a, b in pairwise(many))


def test_bins_are_means_of_equal_stretches() -> None:
    assert binned([1.0, 3.0, 5.0, 7.0, 9.0], 3) == [(0.0, 2.0), (2.0, 6.0), (4.0, 9.0)]
    assert binned([1.0, 2.0], 5) == [(0.0, 1.0), (1.0, 2.0)]
    assert binned([], 5) == []


def test_pairs_of_a_starved_and_a_spared_function_are_counted() -> None:
    served = [outcome("busy"), outcome("other"), outcome("half"), refused("half")]
    starved = [refused("rare"), refused("odd"), refused("odd"), outcome("odd")]
    assert served_shares([*served, *starved]) == ServedShares(least=0.0, most=1.0, unfair_pairs=4)
    assert served_shares(served) == ServedShares(least=0.5, most=1.0, unfair_pairs=0)
