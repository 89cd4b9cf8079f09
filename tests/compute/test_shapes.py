"""Which shapes a survey measures, and what is predicted of iterations."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.references import REFERENCES
from mesh.compute.shapes import BLOCK_TOKENS, SHAPES_MAX, Axes, survey_axes
from mesh.compute.times import Times
from mesh.domain.profile import Grid, IterationShape, Profile
from mesh.domain.reasons import DeviceKind
from tests.support.profiles import PROFILE, profile

TOKENS = st.integers(1, 200_000)
AXES = st.builds(
    survey_axes,
    context_tokens_max=TOKENS,
    batch_max=st.integers(1, 512),
    kv_tokens=st.integers(0, 4_000_000),
    prefill_tokens_max=st.integers(1, 8192),
)


def test_sizes_double_and_the_largest_are_among_them() -> None:
    axes = survey_axes(
        context_tokens_max=2048, batch_max=24, kv_tokens=16384, prefill_tokens_max=200
    )
    assert axes.prefill_rows == (1, 2, 4, 5, 8, 16, 32, 64, 128, 200)
    assert axes.prefill_columns == (0, 64, 128, 256, 512, 1024, 1848, 2048)
    assert axes.decode_rows == (1, 2, 4, 5, 8, 16, 24)
    assert axes.decode_columns == (32, 64, 128, 256, 512, 1024, 2048)


def test_long_contexts_quadruple() -> None:
    axes = survey_axes(
        context_tokens_max=32768, batch_max=8, kv_tokens=65536, prefill_tokens_max=256
    )
    assert axes.decode_columns == (32, 64, 128, 256, 512, 1024, 2048, 8192, 32768)


def test_large_batches_quadruple_and_are_measured_where_the_kv_cache_holds_them() -> None:
    axes = survey_axes(
        context_tokens_max=2048, batch_max=256, kv_tokens=16384, prefill_tokens_max=256
    )
    assert axes.decode_rows == (1, 2, 4, 5, 8, 16, 32, 64, 256)
    largest = [s.decode_context_tokens for _, _, s in axes.decode_shapes() if s.decode_batch == 256]
    assert largest == [32, 64]


def test_tiny_contexts_have_tables_too() -> None:
    axes = survey_axes(context_tokens_max=16, batch_max=1, kv_tokens=32, prefill_tokens_max=256)
    assert axes.prefill_rows == (1, 2, 4, 5, 8, 16)
    assert axes.prefill_columns == (0,)
    assert axes.decode_columns == (16,)


@given(AXES)
def test_every_shape_fits_into_the_kv_cache_and_the_context(axes: Axes) -> None:
    for _, _, shape in axes.decode_shapes():
        blocks = -(-shape.decode_context_tokens // BLOCK_TOKENS)
        assert 1 <= shape.decode_batch * blocks <= axes.kv_blocks
        assert 1 <= shape.decode_context_tokens <= axes.reach_tokens
    for _, _, shape in axes.prefill_shapes():
        assert shape.prefill_tokens >= 1
        assert shape.prefill_past_tokens + shape.prefill_tokens <= axes.reach_tokens


@given(AXES)
def test_axes_ascend_from_the_least_size(axes: Axes) -> None:
    for sizes in (axes.prefill_rows, axes.prefill_columns, axes.decode_rows, axes.decode_columns):
        assert list(sizes) == sorted(set(sizes))
    assert axes.prefill_rows[0] == axes.decode_rows[0] == 1
    assert axes.prefill_columns[0] == 0


@given(AXES)
def test_a_survey_of_the_largest_models_keeps_near_the_bound(axes: Axes) -> None:
    shapes = [*axes.prefill_shapes(), *axes.decode_shapes()]
    assert len(shapes) <= SHAPES_MAX * 1.25


PROMPT_SIZES = st.integers(1, 4096)
PROFILES = st.sampled_from(REFERENCES)


def test_an_iteration_is_a_decode_and_what_its_prompt_tokens_add() -> None:
    """PROFILE takes 1 ms for one token, 20 ms for 256 and 8 ms for a decode of 32 at 512."""
    times = Times(PROFILE)
    decode = IterationShape(decode_batch=32, decode_context_tokens=512)
    prefill = IterationShape(prefill_tokens=256)
    both = IterationShape(decode_batch=32, decode_context_tokens=512, prefill_tokens=256)
    assert times.iteration_s(decode) == 0.008
    assert times.iteration_s(prefill) == 0.020
    assert times.iteration_s(both) == 0.008 + (0.020 - 0.001)


def test_a_mixed_iteration_is_not_quicker_than_a_prefill_of_all_its_rows() -> None:
    """64 ms for 64 tokens, 80 ms for 128, and decodes that cost little: 64 + 64 rows take 80 ms."""
    prefill = Grid(rows=(1, 64, 128), columns=(0,), seconds=((0.060,), (0.064,), (0.080,)))
    decode = Grid(rows=(1, 64), columns=(1,), seconds=((0.060,), (0.061,)))
    times = Times(profile(prefill=prefill, decode=decode))
    both = IterationShape(decode_batch=64, decode_context_tokens=1, prefill_tokens=64)
    assert times.iteration_s(both) == 0.080


def test_an_empty_iteration_takes_no_time() -> None:
    times = Times(PROFILE)
    assert times.iteration_s(IterationShape()) == 0.0


@given(PROFILES, st.floats(0.25, 8.0), PROMPT_SIZES, PROMPT_SIZES, st.integers(1, 64))
def test_the_factor_multiplies_every_prediction(
    profile: Profile, factor: float, tokens: int, past: int, batch: int
) -> None:
    plain, slowed = Times(profile), Times(profile, factor)
    assert slowed.decode_s(batch, past) == plain.decode_s(batch, past) * factor
    assert slowed.prefill_s(tokens, past) == plain.prefill_s(tokens, past) * factor
    assert slowed.chunk_s(tokens, past, batch) == plain.chunk_s(tokens, past, batch) * factor


@given(PROFILES, PROMPT_SIZES, PROMPT_SIZES, st.integers(1, 64), PROMPT_SIZES)
def test_a_mixed_iteration_takes_between_its_parts_and_their_sum(
    profile: Profile, tokens: int, past: int, batch: int, context: int
) -> None:
    times = Times(profile)
    decode_s, prefill_s = times.decode_s(batch, context), times.prefill_s(tokens, past)
    shape = IterationShape(
        decode_batch=batch,
        decode_context_tokens=context,
        prefill_tokens=tokens,
        prefill_past_tokens=past,
    )
    assert decode_s <= times.iteration_s(shape) <= decode_s + prefill_s


def test_each_has_a_model_and_a_device_of_its_own() -> None:
    keys = [(profile.model_id, profile.fingerprint) for profile in REFERENCES]
    assert len(set(keys)) == len(keys)
    assert {profile.device for profile in REFERENCES} == set(DeviceKind)


@pytest.mark.parametrize("profile", REFERENCES, ids=lambda p: f"{p.model_id} on {p.hardware}")
def test_its_tables_begin_with_one_token_and_ascend(profile: Profile) -> None:
    assert profile.measured
    for grid in (profile.prefill, profile.decode):
        assert grid.rows[0] == 1
        assert all(left < right for left, right in pairwise(grid.rows))
        for above, below in pairwise(grid.seconds):
            assert all(a <= b for a, b in zip(above, below, strict=True))
        for row in grid.seconds:
            assert 0.001 < row[0] <= row[-1] < 10


def test_a_published_figure_is_found_again() -> None:
    """SLINFER, table I: Llama-2-7B on the Xeon, 196 ms for a batch of 32 at 1,024 tokens."""
    profile = REFERENCES[0]
    assert profile.model_id == "Llama-2-7B"
    assert profile.decode.at(32, 1024) == 0.196
    assert profile.prefill.at(1024, 0) == 0.567
