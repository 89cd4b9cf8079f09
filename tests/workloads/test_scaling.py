"""Scaling moves, thins and lays over; what it leaves is the trace's own."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads import scaling
from mesh_workloads.generating import LLM_MESH, generate
from mesh_workloads.scaling import Scale
from mesh_workloads.trace import TOKENS_MAX, Arrival, Trace

TRACE = generate(LLM_MESH, seed=3)


def lengths(trace: Trace) -> list[tuple[int, int, int]]:
    return [(a.function, a.input_tokens, a.output_tokens) for a in trace.arrivals]


def test_a_scale_of_one_changes_nothing() -> None:
    assert Scale().of(TRACE) == TRACE


def test_the_time_scale_moves_every_arrival_and_keeps_all() -> None:
    half = Scale(time=0.5).of(TRACE)
    assert half.duration_s == TRACE.duration_s / 2
    assert lengths(half) == lengths(TRACE)
    assert [a.t_s for a in half.arrivals] == [a.t_s * 0.5 for a in TRACE.arrivals]


@given(rate=st.floats(0.05, 0.95), seed=st.integers(0, 99))
def test_thinning_keeps_a_share_of_the_arrivals_in_their_order(rate: float, seed: int) -> None:
    thin = Scale(rate=rate, seed=seed).of(TRACE)
    kept = iter(TRACE.arrivals)
    assert all(arrival in kept for arrival in thin.arrivals)
    expected = rate * len(TRACE.arrivals)
    assert abs(len(thin.arrivals) - expected) < 5 * (expected * (1 - rate)) ** 0.5 + 1
    assert thin == Scale(rate=rate, seed=seed).of(TRACE)


def test_another_seed_leaves_out_others() -> None:
    assert Scale(rate=0.5, seed=1).of(TRACE) != Scale(rate=0.5, seed=2).of(TRACE)


def test_superposition_sends_each_arrival_as_often_and_stays_in_bursts() -> None:
    thrice = Scale(rate=3.0).of(TRACE)
    assert sorted(lengths(thrice)) == sorted(lengths(TRACE) * 3)
    assert thrice.duration_s == TRACE.duration_s
    assert set(TRACE.arrivals) <= set(thrice.arrivals)
    # Laid over itself unturned, its index of dispersion would be three times as high.
    assert thrice.dispersion(10.0) < 2 * TRACE.dispersion(10.0)


def test_a_part_of_a_copy_is_thinned() -> None:
    more = Scale(rate=1.5).of(TRACE)
    assert len(more.arrivals) == pytest.approx(1.5 * len(TRACE.arrivals), rel=0.03)


def test_lengths_are_scaled_and_rounded_to_one_at_least() -> None:
    arrivals = (Arrival(t_s=0.0, function=0, input_tokens=105, output_tokens=3),)
    scaled = Scale(tokens=0.1).of(Trace(name="t", arrivals=arrivals, duration_s=1.0))
    assert lengths(scaled) == [(0, 10, 1)]
    long = Scale(tokens=1000.0).of(
        Trace(
            name="t",
            arrivals=(Arrival(t_s=0.0, function=0, input_tokens=TOKENS_MAX, output_tokens=1),),
            duration_s=1.0,
        )
    )
    assert lengths(long) == [(0, TOKENS_MAX, 1000)]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1001.0])
def test_a_scale_out_of_bounds_is_named(value: float) -> None:
    with pytest.raises(InvalidInput, match="the time scale is"):
        Scale(time=value)
    with pytest.raises(InvalidInput, match="the rate scale is"):
        Scale(rate=value)
    with pytest.raises(InvalidInput, match="the tokens scale is"):
        Scale(tokens=value)


def test_too_many_arrivals_and_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Trace(name="few", arrivals=TRACE.arrivals[:3], duration_s=TRACE.duration_s)
    with pytest.raises(InvalidInput, match="leaves none of the 3 arrivals"):
        Scale(rate=1e-9).of(few)
    with pytest.raises(InvalidInput, match="trace few has no arrivals within 1800 s"):
        Scale().of(replace(few, arrivals=()))
    monkeypatch.setattr(scaling, "ARRIVALS_MAX", 5)
    with pytest.raises(InvalidInput, match="2 times 3 arrivals are more than 5"):
        Scale(rate=2.0).of(few)
