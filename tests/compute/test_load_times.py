"""How long loads are expected to take, by those before: a line through them."""

import random
from statistics import fmean, median

import pytest

from mesh.compute.load_times import PRIORS, LoadTimes, beside_s, fitted, slowdowns
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


def loads_beside(
    draw: random.Random, count: int, *, alone_s: float, slowdown: float, uneven: float
) -> list[tuple[float, float, float]]:
    """What the node has to compute as each of them begins, of that beside it, and what it takes."""
    loads = []
    for _ in range(count):
        computes_s = draw.choice((0.0, 0.2, 0.4, 9.0))
        seconds = beside_s(alone_s, slowdown, computes_s) * draw.uniform(1 - uneven, 1 + uneven)
        loads.append((computes_s, min(computes_s, seconds), seconds))
    return loads


def test_loads_beside_unlike_shares_of_iterations_are_expected_to_a_tenth() -> None:
    """Loads of 0.26 to 0.62 s, uneven by up to a tenth. The median of all is 0.25 off."""
    draw = random.Random(5)
    size, tier, errors = 137 * MIB, LoadTier.PREPARED, []
    times = LoadTimes(1.5)
    times.learn(tier, PRIORS[tier], size, 0.27)
    loads = loads_beside(draw, 100, alone_s=0.26, slowdown=1.4, uneven=0.1)
    for computes_s, computed_s, seconds in loads:
        expected_s = beside_s(times.expected_s(tier, size), times.slowdown, computes_s)
        errors.append(abs(expected_s - seconds) / seconds)
        times.learn(tier, PRIORS[tier], size, seconds, computed_s)
    assert fmean(errors) < 0.1
    middle_s = median(seconds for _, _, seconds in loads)
    assert fmean(abs(middle_s - seconds) / seconds for _, _, seconds in loads) > 0.25
    assert times.slowdown == pytest.approx(1.4, rel=0.25)
    assert times.planned_s(tier, size) > times.expected_s(tier, size)


def test_a_load_beside_is_as_long_as_what_is_computed_in_it_makes_it() -> None:
    assert beside_s(2.0, 1.0, 0.0) == 2.0
    assert beside_s(2.0, 1.0, 4.0) == beside_s(2.0, 1.0, 99.0) == 4.0
    seconds = beside_s(2.0, 1.0, 1.5)
    assert seconds == pytest.approx(2.0 * (1.0 + 1.5 / seconds))
    assert beside_s(2.0, LoadTimes(0.5).slowdown, 1.5) == 2.0, "none is quicker beside iterations"


def test_a_slowdown_is_read_off_loads_that_had_unlike_shares() -> None:
    loads = [(3.0, 1.0), (2.0, 0.5), (2.2, 0.6)]
    assert list(slowdowns(loads)) == pytest.approx([2.0, 2.0]), "0.5 and 0.6 are alike"
    assert list(slowdowns([(1.0, 0.9), (2.0, 0.1), (9.0, 0.8)])) == [0.0, 8.0]
    assert not list(slowdowns([(1.0, 1.0), (2.0, 0.8)]))
