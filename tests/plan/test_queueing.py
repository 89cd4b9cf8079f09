"""Erlang's formulas beside their closed forms, and sharing beside chains solved otherwise."""

import math
import random
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.plan.queueing import erlang_c, shared_sojourn_s, wait_of_s, wait_s


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
    assert wait_of_s(0.5, 1.0, 1, 0.0) == pytest.approx(0.5), "M/D/1"
    assert wait_of_s(0.5, 1.0, 1, 3.0) == pytest.approx(2.0), "Pollaczek and Khinchine"
    assert math.isinf(wait_s(2.0, 1.0, 2))
    assert math.isinf(wait_of_s(2.1, 1.0, 2, 0.0))


def test_equal_services_wait_as_they_do_when_simulated() -> None:
    draw = random.Random(1)
    servers, used, at_s, waited_s = 8, 0.8, 0.0, 0.0
    free = [0.0] * servers
    count = 60_000
    for _ in range(count):
        at_s += draw.expovariate(used * servers)
        begun_s = max(at_s, heappop(free))
        heappush(free, begun_s + 1.0)
        waited_s += begun_s - at_s
    expected_s = wait_of_s(used * servers, 1.0, servers, 0.0)
    assert waited_s / count == pytest.approx(expected_s, rel=0.08)


@given(st.integers(1, 30), st.floats(0.05, 0.95), st.floats(0.01, 10))
def test_devices_that_are_not_shared_are_servers(devices: int, used: float, work_s: float) -> None:
    rate = used * devices / work_s
    sojourn_s = shared_sojourn_s(rate, work_s, devices, (0.0, 1.0))
    assert sojourn_s == pytest.approx(work_s + wait_s(rate, work_s, devices), rel=1e-9)


def test_a_device_that_does_as_many_alike_as_one_is_processor_sharing() -> None:
    """M/G/1-PS: work / (1 - ρ), whatever the services; here up to 60 share."""
    sojourn_s = shared_sojourn_s(0.5, 1.0, 1, (0.0, *[1.0] * 60), 0.0)
    assert sojourn_s == pytest.approx(2.0, rel=1e-6)
    assert math.isinf(shared_sojourn_s(1.3, 1.0, 1, (0.0, 1.0, 1.22)))
