"""How long loads are expected to take, by those before: a line through them."""

import random

import pytest

from mesh.compute.load_times import PRIORS, fitted
from mesh.domain.steps import LoadRate, LoadTier

PRIOR = PRIORS[LoadTier.DISK]
MIB = 1 << 20


def test_a_line_is_found_though_every_fourth_load_was_held_up() -> None:
    """Sizes of 100 MiB to 8 GiB, 1.2 s and 0.5 GB/s; a decode beside a load made it 2.5 times."""
    real = LoadRate(fixed_s=1.2, bytes_per_s=0.5e9)
    draw = random.Random(1)
    loads = []
    for number in range(16):
        size = draw.randint(100 * MIB, 8192 * MIB)
        held_up = 2.5 if number % 4 == 0 else draw.uniform(0.95, 1.05)
        loads.append((size, real.load_s(size) * held_up))
    found = fitted(loads, PRIOR)
    assert found.fixed_s == pytest.approx(1.2, rel=0.35)
    for size in (128 * MIB, 1024 * MIB, 4096 * MIB):
        assert found.load_s(size) == pytest.approx(real.load_s(size), rel=0.2)


def test_loads_of_one_size_scale_the_prior() -> None:
    loads = [(200 * MIB, 2.0), (200 * MIB, 2.2), (210 * MIB, 2.1), (200 * MIB, 9.0)]
    found = fitted(loads, PRIOR)
    assert found.load_s(200 * MIB) == pytest.approx(2.1, rel=0.05)
    assert found.fixed_s / found.load_s(200 * MIB) == pytest.approx(
        PRIOR.fixed_s / PRIOR.load_s(200 * MIB)
    )


def test_a_line_that_would_begin_below_0_or_descend_is_none() -> None:
    for loads in ([(100 * MIB, 3.0), (400 * MIB, 1.0)], [(100 * MIB, 0.1), (400 * MIB, 4.0)]):
        found = fitted(loads, PRIOR)
        assert found.fixed_s / found.bytes_per_s > 0
        ratio = found.fixed_s * found.bytes_per_s
        assert ratio == pytest.approx(PRIOR.fixed_s * PRIOR.bytes_per_s), "the prior's shape"
