"""Eq. 2 of LLM-Mesh by hand; a watermark that neither starves a cache nor moves it to and fro."""

from fractions import Fraction
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.memory.demand import expected_tokens, recommended
from mesh.policy.interface import KvDemand
from mesh.policy.room import by_demand

SHARES = st.integers(0, 16).map(lambda eighths: eighths / 8)
"""Exact in binary, so that what is compared is not rounding."""
BLOCKS = st.integers(0, 10_000)
LENGTHS = st.tuples(st.integers(1, 500), st.integers(0, 500), st.integers(500, 1000))
MEANS = st.floats(0, 1500)


def demand(prompt: int, output: int, output_max: int, mean: float) -> int:
    return expected_tokens(prompt, output, output_tokens_max=output_max, output_tokens_mean=mean)


@pytest.mark.parametrize(
    ("output", "output_max", "mean", "expected"),
    [
        (3, 1000, 5.0, 15),
        (5, 1000, 5.0, 15),
        (8, 1000, 5.0, 18),
        (3, 1000, 5.1, 16),
        (3, 4, 5.0, 14),
        (4, 4, 5.0, 14),
    ],
    ids=["mean", "as-the-mean", "longer", "rounded-up", "no-more-than-it-may", "at-its-end"],
)
def test_a_request_is_expected_to_write_the_mean_or_what_it_has_but_no_more_than_it_may(
    output: int, output_max: int, mean: float, expected: int
) -> None:
    assert demand(10, output, output_max, mean) == expected


@given(LENGTHS, MEANS, MEANS)
def test_longer_answers_never_require_less(
    lengths: tuple[int, int, int], mean: float, other_mean: float
) -> None:
    low, high = sorted((mean, other_mean))
    assert lengths[0] <= demand(*lengths, low) <= demand(*lengths, high)


def target(current: int, required: int, share: float = 0.25) -> int:
    """What becomes of a cache of so many blocks."""
    size = by_demand(
        KvDemand(
            required_blocks=required,
            block_tokens=16,
            context_tokens=4096,
            tokens_least=0,
            watermark_share=share,
        )
    )
    stays = size.required_blocks <= current <= size.kept_blocks_max
    return current if stays else size.wanted_blocks


def test_a_policy_s_own_numbers_go_before_the_cell_s() -> None:
    demand = KvDemand(
        required_blocks=3,
        block_tokens=16,
        context_tokens=512,
        tokens_least=1024,
        watermark_share=0.25,
    )
    assert by_demand(demand).required_blocks == 512 // 16, "no more than its context"
    own = by_demand(demand, tokens_least=64, watermark_share=0.5)
    assert (own.required_blocks, own.wanted_blocks) == (4, 6)


@pytest.mark.parametrize(
    ("current", "required", "expected"),
    [
        (0, 100, 125),
        (99, 100, 125),
        (100, 100, 100),
        (156, 100, 156),
        (157, 100, 125),
        (125, 80, 125),
        (125, 79, 99),
        (7, 0, 0),
    ],
    ids=["new", "short", "does", "large", "too-large", "at-the-mark", "below-it", "nothing"],
)
def test_a_cache_grows_when_it_is_short_and_shrinks_when_it_is_far_too_large(
    current: int, required: int, expected: int
) -> None:
    """With w = 25 %: 100 required, 125 recommended, 156.25 the most that is kept."""
    assert target(current, required) == expected


def test_without_a_watermark_the_cache_has_what_is_required() -> None:
    assert [target(current, 10, share=0.0) for current in (9, 10, 11)] == [10, 10, 10]


def test_what_is_recommended_is_rounded_up() -> None:
    assert [recommended(n) for n in (0, 1, 4, 5)] == [0, 2, 5, 7]


@given(SHARES, BLOCKS, BLOCKS, st.data())
def test_a_cache_that_has_just_moved_stays_for_all_that_is_required_within_the_band(
    share: float, current: int, required: int, data: st.DataObject
) -> None:
    moved = recommended(required, share)
    band = range(int(moved / (1 + Fraction(share)) ** 2) + 1, moved + 1)
    assert target(moved, required, share) == moved
    if band:
        assert target(moved, data.draw(st.sampled_from(band)), share) == moved
    once = target(current, required, share)
    assert target(once, required, share) == once


def test_a_load_that_swings_by_the_watermark_moves_the_cache_once() -> None:
    sizes = [0]
    for required in islice(cycle((100, 125, 80)), 30):
        sizes.append(target(sizes[-1], required))
    assert set(sizes[1:]) == {125}


@given(SHARES, BLOCKS, BLOCKS, BLOCKS)
def test_the_target_does_and_grows_with_what_is_required(
    share: float, current: int, required: int, other: int
) -> None:
    low, high = sorted((required, other))
    assert target(current, low, share) <= target(current, high, share)
    assert recommended(low, share) <= recommended(high, share)
    found = target(current, required, share)
    assert required <= found <= max(current, recommended(required, share))
    assert found <= (1 + Fraction(share)) * recommended(required, share)
