"""Two senders' records of one trace, compared."""

import pytest

from bench.agreement import Metered, Round, differences, metered, targets, told
from bench.harness import Report


def rounds(
    *rows: tuple[str, str, str, str], counts: float = 0.0, seen: tuple[int, int, int] = (2, 2, 2)
) -> list[Round]:
    names = ("end", "met", "met_in_the_mean", "ttft_s")
    return [
        Round(
            rows=tuple(dict(zip(names, row, strict=True)) for row in rows),
            counts_difference=counts,
            metered=Metered(calls=seen[0], served=seen[1], met=seen[2]),
        )
    ]


def test_each_share_is_compared_and_the_worst_count_told() -> None:
    one = told(rounds(("length", "1", "1", "1.0"), ("length", "0", "1", "2.0"), counts=0.02))
    other = told(rounds(("length", "1", "1", "1.0"), ("failed", "0", "0", ""), seen=(2, 1, 2)))
    assert (one.attainment, one.attainment_in_the_mean, one.ttft_s_p95) == (0.5, 1.0, 2.0)
    assert differences(one, other) == pytest.approx(
        {
            "attainment_difference": 0.5,
            "errors_difference": 0.5,
            "ttft_p95_difference": 0.5,
            "counts_difference": 0.02,
            "metrics_attainment_difference": 0.5,
            "metrics_errors_difference": 0.0,
        }
    )
    assert set(differences(one, one).values()) == {0.0, 0.02}


def test_what_the_controller_counts_is_read_from_its_metrics() -> None:
    lines = [
        'vllm:request_success_total{model_name="a",finished_reason="stop"} 5.0',
        'vllm:request_success_total{model_name="b",finished_reason="cancelled"} 1.0',
        'mesh_requests_refused_total{model_name="a",reason="memory_full"} 2.0',
        'mesh_requests_met_slo_total{model_name="a"} 4.0',
    ]
    seen = metered("\n".join(lines) + "\n")
    assert (seen.calls, seen.served, seen.met) == (8, 5, 4)
    assert seen.since(seen) == Metered(calls=0, served=0, met=0)


def test_senders_may_differ_by_two_per_cent_and_counts_by_one() -> None:
    names = ("attainment_difference", "ttft_p95_difference", "counts_difference")
    found = dict(zip(names, (0.02, 0.021, 0.02), strict=True))
    missed = Report(figures=found, targets=targets(found)).missed()
    assert [line.split()[0] for line in missed] == ["ttft_p95_difference", "counts_difference"]
