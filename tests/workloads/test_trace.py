"""A trace is in order and within its time, and its figures are those of its arrivals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads.trace import Arrival, Trace, percentile


def trace(times: list[float], duration_s: float = 10.0, functions: int = 1) -> Trace:
    arrivals = tuple(
        Arrival(t_s=t, function=i % functions, input_tokens=10 * (i + 1), output_tokens=i + 1)
        for i, t in enumerate(times)
    )
    return Trace(name="t", arrivals=arrivals, duration_s=duration_s)


def test_a_summary_counts_what_is_there() -> None:
    summary = trace([0.0, 1.0, 1.0, 2.0, 9.0], functions=2).summary()
    assert (summary.arrivals, summary.functions) == (5, 2)
    assert summary.rate_per_s == 0.5
    assert summary.busiest_tenth == 0.6
    assert summary.input_tokens.mean == 30
    assert (summary.input_tokens.p50, summary.input_tokens.p90) == (30, 50)
    assert (summary.output_tokens.p99, summary.output_tokens.most) == (5, 5)


def test_a_trace_without_arrivals_has_a_summary() -> None:
    summary = trace([]).summary()
    assert (summary.arrivals, summary.rate_per_s, summary.busiest_tenth) == (0, 0.0, 0.0)
    assert summary.input_tokens.most == 0


@pytest.mark.parametrize("times", [[1.0, 0.5], [-0.5], [11.0], [float("nan")]])
def test_arrivals_out_of_order_or_time_are_refused(times: list[float]) -> None:
    with pytest.raises(InvalidInput, match="trace t: an arrival"):
        trace(times)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_trace_has_a_duration(duration_s: float) -> None:
    with pytest.raises(InvalidInput, match="its duration is"):
        trace([], duration_s)


def test_dispersion_tells_even_arrivals_from_bursts() -> None:
    even = [i + 0.5 for i in range(10)]
    assert trace(even).dispersion(1.0) == 0.0
    # 10 in one of ten windows: mean 1, variance 9.
    assert trace([3.5] * 10).dispersion(1.0) == pytest.approx(9.0)
    assert trace([]).dispersion(1.0) == 0.0


@pytest.mark.parametrize("window_s", [0.0, -1.0, 5.1])
def test_dispersion_needs_two_windows(window_s: float) -> None:
    with pytest.raises(InvalidInput, match="less than two windows"):
        trace([1.0]).dispersion(window_s)


@given(st.lists(st.integers(0, 1000), min_size=1), st.floats(0, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values: list[int], p: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, p)
    assert found in ordered
    assert sum(v <= found for v in ordered) >= len(ordered) * p / 100 - 1e-9
    assert sum(v < found for v in ordered) <= len(ordered) * p / 100
