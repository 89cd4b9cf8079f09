"""Which shapes a survey measures."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.shapes import BLOCK_TOKENS, SHAPES_MAX, Axes, survey_axes

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
    assert axes.prefill_rows == (1, 2, 4, 8, 16, 32, 64, 128, 200)
    assert axes.prefill_columns == (0, 64, 128, 256, 512, 1024, 1848, 2048)
    assert axes.decode_rows == (1, 2, 4, 8, 16, 24)
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
    assert axes.decode_rows == (1, 2, 4, 8, 16, 32, 64, 256)
    largest = [s.decode_context_tokens for _, _, s in axes.decode_shapes() if s.decode_batch == 256]
    assert largest == [32, 64]


def test_tiny_contexts_have_tables_too() -> None:
    axes = survey_axes(context_tokens_max=16, batch_max=1, kv_tokens=32, prefill_tokens_max=256)
    assert axes.prefill_rows == (1, 2, 4, 8, 16)
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
