"""Rates add up to the load and fall off as their law says."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads.rates import Lognormal, Rates, Zipf

LAWS = st.one_of(
    st.builds(Zipf, exponent=st.floats(0, 10)), st.builds(Lognormal, sigma=st.floats(0, 10))
)


@given(LAWS, st.integers(1, 300), st.floats(0.001, 1000))
def test_rates_descend_and_add_up(law: Rates, functions: int, total_per_s: float) -> None:
    rates = law.rates_per_s(functions, total_per_s)
    assert len(rates) == functions
    assert math.fsum(rates) == pytest.approx(total_per_s)
    assert min(rates) > 0
    assert all(a >= b or a == pytest.approx(b) for a, b in pairwise(rates))


def test_zipf_falls_with_the_rank() -> None:
    rates = Zipf(exponent=2.0).rates_per_s(10, 1.0)
    assert rates[0] / rates[4] == pytest.approx(25.0)


def test_the_logarithms_of_lognormal_rates_deviate_by_sigma() -> None:
    logs = [math.log(rate) for rate in Lognormal(sigma=1.5).rates_per_s(5000, 1.0)]
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / len(logs))
    assert deviation == pytest.approx(1.5, rel=0.01)


def test_the_busiest_tenth_has_its_share() -> None:
    """What the LLM-Mesh load's busiest 13 of 128 functions have: 75 %."""
    rates = Lognormal(sigma=1.91).rates_per_s(128, 1.0)
    assert sum(rates[:13]) == pytest.approx(0.754, abs=0.06)


@pytest.mark.parametrize(
    ("law", "functions", "total_per_s"),
    [
        (Zipf(exponent=-1.0), 1, 1.0),
        (Lognormal(sigma=math.nan), 1, 1.0),
        (Zipf(exponent=1.0), 0, 1.0),
        (Zipf(exponent=1.0), 1_000_000, 1.0),
        (Zipf(exponent=1.0), 1, 0.0),
        (Zipf(exponent=1.0), 1, math.inf),
    ],
)
def test_parameters_out_of_bounds_are_refused(
    law: Rates, functions: int, total_per_s: float
) -> None:
    with pytest.raises(InvalidInput):
        law.rates_per_s(functions, total_per_s)
