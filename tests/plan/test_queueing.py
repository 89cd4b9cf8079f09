"""Erlang's formulas beside their closed forms, and sharing beside chains solved otherwise."""

import math
import random
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.plan.queueing import batched_sojourn_s, erlang_c, shared_s, wait_s


def literally(servers: int, load: float) -> float:
    """Equation 2 with the bracket that it lacks."""
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


@given(st.integers(1, 60), st.floats(0.001, 0.999))
def test_the_recurrence_is_the_papers_formula(servers: int, used: float) -> None:
    assert erlang_c(servers, used * servers) == pytest.approx(
        literally(servers, used * servers), rel=1e-9
    )


def test_it_is_stable_where_the_formula_overflows() -> None:
    with pytest.raises(OverflowError):
        literally(400, 380.0)
    assert 0 < erlang_c(400, 380.0) < erlang_c(400, 399.0) < 1
    assert erlang_c(3, 3.0) == 1.0


def test_waits_of_one_server_are_the_known_ones() -> None:
    assert wait_s(0.5, 1.0, 1) == pytest.approx(1.0), "M/M/1"
    assert wait_s(0.5, 1.0, 1, 0.0) == pytest.approx(0.5), "M/D/1"
    assert wait_s(0.5, 1.0, 1, 3.0) == pytest.approx(2.0), "Pollaczek and Khinchine"
    two_moments = 1.5 / (1 / wait_s(6.4, 1.0, 8) + 0.5 / wait_s(6.4, 1.0, 8, 0.0))
    assert wait_s(6.4, 1.0, 8, 0.5) == pytest.approx(two_moments), "Kimura's harmonic mean"
    assert math.isinf(wait_s(2.0, 1.0, 2))


def simulated_s(rate: float, further_s: float, servers: int, batch_max: int) -> float:
    """The mean sojourn where a server takes what waits, a second for the first of a batch."""
    draw, at_s, count = random.Random(1), 0.0, 20_000
    arrivals = [at_s := at_s + draw.expovariate(rate) for _ in range(count)]
    free, number, total_s = [0.0] * servers, 0, 0.0
    while number < count:
        begun_s, first = max(arrivals[number], heappop(free)), number
        while number < min(count, first + batch_max) and arrivals[number] <= begun_s:
            number += 1
        end_s = begun_s + 1.0 + (number - first - 1) * further_s
        heappush(free, end_s)
        total_s += sum(end_s - each_s for each_s in arrivals[first:number])
    return total_s / count


def test_equal_services_wait_as_they_do_when_simulated() -> None:
    expected_s = 1.0 + wait_s(6.4, 1.0, 8, 0.0)
    assert simulated_s(6.4, 1.0, 8, 1) == pytest.approx(expected_s, rel=0.03)


@pytest.mark.parametrize("used", [0.4, 0.6, 0.8])
@pytest.mark.parametrize(
    ("servers", "further_s", "batch_max"),
    [(1, 1.0, 8), (1, 0.5, 8), (2, 0.2, 8), (1, 1.0, 2), (2, 1.0, 8), (4, 1.0, 8), (8, 1.0, 2)],
)
def test_batches_wait_as_they_do_when_simulated(
    servers: int, further_s: float, batch_max: int, used: float
) -> None:
    expected_s = batched_sojourn_s(used * servers, 1.0, further_s, servers, batch_max)
    found_s = simulated_s(used * servers, further_s, servers, batch_max)
    assert expected_s == pytest.approx(found_s, rel=0.1)


@given(st.floats(0.05, 0.8), st.floats(0, 2))
def test_batches_without_a_bound_are_exact_for_one_server(used: float, variation: float) -> None:
    """By hand: E[N²] / E[N] = 1 / (1 - ρ²), whose half goes beyond M/G/1 with weight ρ²."""
    alone_s = wait_s(used, 1.0, 1, variation)
    expected_s = 1.0 + alone_s * (1 + 2 * used) / (1 + used)
    found_s = batched_sojourn_s(used, 1.0, 1.0, 1, 10**9, variation)
    assert found_s == pytest.approx(expected_s, rel=0.02)
    assert math.isinf(batched_sojourn_s(1.01, 1.0, 1.0, 1, 8, variation))


@given(st.integers(1, 30), st.floats(0.05, 0.95), st.floats(0.01, 10))
def test_devices_that_are_not_shared_are_servers(devices: int, used: float, work_s: float) -> None:
    rate = used * devices / work_s
    sojourn_s = sum(shared_s(rate, work_s, devices, (0.0, 1.0)))
    assert sojourn_s == pytest.approx(work_s + wait_s(rate, work_s, devices), rel=1e-9)


def test_a_device_that_does_as_many_alike_as_one_is_processor_sharing() -> None:
    """M/G/1-PS: work / (1 - ρ), whatever the services; here up to 60 share."""
    sojourn_s = sum(shared_s(0.5, 1.0, 1, (0.0, *[1.0] * 60), 0.0))
    assert sojourn_s == pytest.approx(2.0, rel=1e-6)
    assert math.isinf(sum(shared_s(1.3, 1.0, 1, (0.0, 1.0, 1.22))))
