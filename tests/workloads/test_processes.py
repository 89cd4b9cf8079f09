"""Arrival processes have the rate and the dispersion that they state."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads.processes import POISSON, Clustered, Diurnal, OnOff, Process

PROCESSES: list[Process] = [
    POISSON,
    Clustered(dispersion=4.0),
    OnOff(duty=0.25, on_s=2.0),
    OnOff(duty=0.9, on_s=20.0),
]


def counts(process: Process, rate_per_s: float, window_s: float, windows: int) -> list[int]:
    """Arrivals by window."""
    found = [0] * windows
    for at_s in process.times(rate_per_s, window_s * windows, random.Random(11)):
        found[int(at_s / window_s)] += 1
    return found


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("rate_per_s", [0.5, 4.0])
def test_rate_and_dispersion_are_as_stated(process: Process, rate_per_s: float) -> None:
    window_s = 100.0
    found = counts(process, rate_per_s, window_s, 1500)
    mean = sum(found) / len(found)
    variance = sum((n - mean) ** 2 for n in found) / len(found)
    assert mean == pytest.approx(rate_per_s * window_s, rel=0.03)
    assert variance / mean == pytest.approx(
        process.index_of_dispersion(rate_per_s, window_s), rel=0.12
    )


@pytest.mark.parametrize("window_s", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("process", [OnOff(duty=0.25, on_s=2.0), Clustered(dispersion=8.0)])
def test_dispersion_in_short_windows_is_as_stated(process: Process, window_s: float) -> None:
    found = counts(process, 5.0, window_s, 4000)
    mean = sum(found) / len(found)
    variance = sum((n - mean) ** 2 for n in found) / len(found)
    assert variance / mean == pytest.approx(process.index_of_dispersion(5.0, window_s), rel=0.12)


@pytest.mark.parametrize("process", PROCESSES)
def test_processes_begin_in_equilibrium(process: Process) -> None:
    """The first second brings as many as any other."""
    draw, runs = random.Random(5), 4000
    first = sum(len(list(process.times(0.5, 1.0, draw))) for _ in range(runs))
    assert first / runs == pytest.approx(0.5, rel=0.12)


@given(
    st.sampled_from(PROCESSES),
    st.floats(1e-12, 50),
    st.floats(0.01, 100),
    st.integers(0, 1000),
)
def test_times_ascend(process: Process, rate_per_s: float, until_s: float, seed: int) -> None:
    times = list(process.times(rate_per_s, until_s, random.Random(seed)))
    assert times == sorted(times)
    assert all(0 <= t < until_s for t in times)
    assert times == list(process.times(rate_per_s, until_s, random.Random(seed)))


@given(
    st.floats(0, 0.99),
    st.floats(1, 86_400),
    st.floats(0, 1),
    st.floats(0, 1_000_000),
)
def test_the_clock_of_the_day_runs_forward_and_back(
    swing: float, period_s: float, phase: float, t_s: float
) -> None:
    day = Diurnal(swing=swing, period_s=period_s, phase=phase)
    assert day.when_s(day.passed_s(t_s)) == pytest.approx(t_s, abs=1e-4)
    assert day.passed_s(t_s + period_s) - day.passed_s(t_s) == pytest.approx(period_s, abs=1e-4)
    assert day.passed_s(t_s + 1.0) > day.passed_s(t_s)


@pytest.mark.parametrize("value", [-1.0, 1e9, float("nan")])
def test_parameters_out_of_bounds_are_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match="dispersion is"):
        Clustered(dispersion=value)
    with pytest.raises(InvalidInput, match="duty is"):
        OnOff(duty=value, on_s=1.0)
    with pytest.raises(InvalidInput, match="on_s is"):
        OnOff(duty=0.5, on_s=value)
    with pytest.raises(InvalidInput, match="swing is"):
        Diurnal(swing=value)
    with pytest.raises(InvalidInput, match="period_s is"):
        Diurnal(period_s=value)
    with pytest.raises(InvalidInput, match="phase is"):
        Diurnal(phase=value)
