"""Two senders' records of one trace, compared."""

import pytest

from bench.agreement.__main__ import Round, differences, targets, told


def rounds(*rows: tuple[str, str, str, str], counts: float = 0.0) -> list[Round]:
    names = ("end", "met", "met_in_the_mean", "ttft_s")
    return [
        Round(
            rows=tuple(dict(zip(names, row, strict=True)) for row in rows), counts_difference=counts
        )
    ]


def test_each_share_is_compared_and_the_worst_count_told() -> None:
    one = told(rounds(("length", "1", "1", "1.0"), ("length", "0", "1", "2.0"), counts=0.02))
    other = told(rounds(("length", "1", "1", "1.0"), ("failed", "0", "0", "")))
    assert (one.attainment, one.attainment_in_the_mean, one.ttft_s_p95) == (0.5, 1.0, 2.0)
    assert differences(one, other) == pytest.approx(
        {
            "attainment_difference": 0.5,
            "errors_difference": 0.5,
            "ttft_p95_difference": 0.5,
            "counts_difference": 0.02,
        }
    )
    assert set(differences(one, one).values()) == {0.0, 0.02}


def test_senders_may_differ_by_two_per_cent_and_counts_by_one() -> None:
    names = ("attainment_difference", "ttft_p95_difference", "counts_difference")
    assert targets(dict(zip(names, (0.02, 0.021, 0.02), strict=True))) == {
        "attainment_difference": True,
        "ttft_p95_difference": False,
        "counts_difference": False,
    }
