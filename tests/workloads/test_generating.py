"""Generated workloads: in order, the same by seed, with the statistics that they claim."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads import generating
from mesh_workloads.generating import LLM_MESH, Workload, generate
from mesh_workloads.processes import POISSON, Clustered, Diurnal, OnOff
from mesh_workloads.rates import Lognormal, Zipf
from mesh_workloads.sampling import load_for

LONG = replace(LLM_MESH, duration_s=10_000.0)
"""Long enough for statistics."""


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 20),
    st.floats(0.01, 5),
    st.floats(1, 200),
    st.sampled_from([POISSON, Clustered(dispersion=5.0), OnOff(duty=0.2, on_s=3.0)]),
    st.sampled_from([Diurnal(), Diurnal(swing=0.9, period_s=50.0, phase=0.3)]),
    st.integers(0, 2**64),
)
def test_any_workload_is_in_order_and_the_same_again(
    functions: int,
    rate_per_s: float,
    duration_s: float,
    process: Clustered | OnOff,
    diurnal: Diurnal,
    seed: int,
) -> None:
    workload = Workload(
        name="w",
        functions=functions,
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        rates=Zipf(exponent=1.0),
        process=process,
        diurnal=diurnal,
    )
    trace = generate(workload, seed)
    assert trace == generate(workload, seed)
    times = [a.t_s for a in trace.arrivals]
    assert times == sorted(times)
    assert all(0 <= t <= duration_s for t in times)
    assert all(0 <= a.function < functions for a in trace.arrivals)
    assert all(a.input_tokens >= 1 and a.output_tokens >= 1 for a in trace.arrivals)


PINNED = [(0.107925, 17, 399, 407), (0.359138, 0, 399, 423), (0.513889, 0, 1031, 56)]


def test_the_first_arrivals_are_these_on_every_python() -> None:
    first = generate(replace(LLM_MESH, duration_s=60.0), seed=1).arrivals[:3]
    found = [(a.t_s, a.function, a.input_tokens, a.output_tokens) for a in first]
    assert found == PINNED


def test_another_seed_gives_other_arrivals() -> None:
    short = replace(LLM_MESH, duration_s=60.0)
    assert generate(short, 1).arrivals != generate(short, 2).arrivals


def test_rates_of_functions_are_as_stated() -> None:
    workload = replace(LONG, process=POISSON)
    trace = generate(workload, seed=2)
    assert trace.summary().rate_per_s == pytest.approx(workload.rate_per_s, rel=0.02)
    counts = Counter(a.function for a in trace.arrivals)
    for function, rate_per_s in enumerate(workload.rates_per_s()):
        expected = rate_per_s * workload.duration_s
        assert abs(counts[function] - expected) <= 5 * math.sqrt(expected) + 1


@pytest.mark.parametrize("window_s", [1.0, 10.0, 60.0])
def test_dispersion_is_as_stated(window_s: float) -> None:
    workload = replace(LONG, process=OnOff(duty=0.4, on_s=20.0))
    found = generate(workload, seed=3).dispersion(window_s)
    assert found == pytest.approx(workload.index_of_dispersion(window_s), rel=0.2)


def test_the_stated_dispersion_is_near_that_of_the_load_it_imitates() -> None:
    stated = [LLM_MESH.index_of_dispersion(window_s) for window_s in (1.0, 10.0, 60.0)]
    assert stated == pytest.approx([1.51, 6.17, 32.6], rel=0.16)


def test_lengths_and_shares_are_those_of_the_load_it_imitates() -> None:
    summary = generate(replace(LONG, process=POISSON), seed=4).summary()
    assert 120 <= summary.functions <= 128
    assert summary.busiest_tenth == pytest.approx(0.754, abs=0.06)
    assert summary.input_tokens.p50 == pytest.approx(980, rel=0.1)
    assert summary.output_tokens.p50 == pytest.approx(140, rel=0.15)
    assert summary.output_tokens.p99 == pytest.approx(603, rel=0.05)


def test_the_day_s_swing_is_in_the_arrivals() -> None:
    workload = replace(LONG, process=POISSON, diurnal=Diurnal(swing=0.8, period_s=5_000.0))
    trace = generate(workload, seed=5)
    quarters = Counter(int(a.t_s % 5_000 // 1250) for a in trace.arrivals)
    # The sine's mean over the first and the third quarter is 2 / pi and -2 / pi.
    even = len(trace.arrivals) / 4
    assert quarters[0] == pytest.approx(even * (1 + 0.8 * 2 / math.pi), rel=0.05)
    assert quarters[2] == pytest.approx(even * (1 - 0.8 * 2 / math.pi), rel=0.05)
    assert len(trace.arrivals) == pytest.approx(workload.rate_per_s * 10_000, rel=0.02)


def test_a_function_keeps_its_requests_whatever_the_others() -> None:
    one = Workload(
        name="w", functions=1, rate_per_s=1.0, duration_s=50.0, rates=Lognormal(sigma=0.0)
    )
    two = replace(one, functions=2, rate_per_s=2.0)
    first = [a for a in generate(two, 9).arrivals if a.function == 0]
    assert first == list(generate(one, 9).arrivals)


def test_loads_can_be_cut_from_a_generated_trace() -> None:
    trace = generate(LLM_MESH, seed=1)
    rates = [len(load_for(trace, models).arrivals) for models in (32, 64, 128)]
    assert rates == sorted(rates)
    assert rates[2] == len(trace.arrivals)


@pytest.mark.parametrize(
    ("duration_s", "rate_per_s"), [(0.0, 1.0), (math.nan, 1.0), (1e9, 1.0), (1.0, 1e9)]
)
def test_a_workload_out_of_bounds_is_refused(duration_s: float, rate_per_s: float) -> None:
    with pytest.raises(InvalidInput, match="workload llm-mesh"):
        replace(LLM_MESH, duration_s=duration_s, rate_per_s=rate_per_s)


def test_more_arrivals_than_a_trace_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(LLM_MESH, duration_s=60.0)
    monkeypatch.setattr(generating, "ARRIVALS_MAX", 10)
    with pytest.raises(InvalidInput, match="more than 10 arrivals"):
        generate(short, 1)
