"""Which iterations a survey measures: the sizes at both axes of its two tables.

Sizes double from one to the next (LLM-Mesh §5.2); past contexts of 2,048 tokens, or sooner where
there would be too many shapes, and past batches of 64 they quadruple. Rows of both tables have
STEP_ROWS in addition. A shape that the KV cache cannot hold is left out; its cell is filled by
`mesh.compute.tables`.
"""

from collections.abc import Iterator

from mesh.domain.profile import IterationShape
from mesh.domain.values import dataclass

BLOCK_TOKENS = 32
"""KV tokens are allocated in blocks of so many: an engine with smaller ones holds more."""
SHAPES_MAX = 165
DOUBLE_UNTIL_TOKENS = (2048, 512, 128, 32)
"""Up to where context sizes double, in the order in which it is tried to keep below SHAPES_MAX."""
COARSE = 0
"""Up to where sizes double of which few are measured: all of them quadruple."""
DOUBLE_UNTIL_BATCH = 64
"""Up to where batches double: beyond, their times grow evenly, and take long to measure."""
STEP_ROWS = 5
"""From so many rows on, products are computed by other kernels (OpenVINO with AVX2). A decode of
SmolLM2-135M at contexts of 128 takes 16.6 ms for 4 sequences, 26.2 for 5 and 29.9 for 8 (two quiet
cores); without a row of 5 it would be expected to take 19.9.
"""
PAST_TOKENS_MIN = 64
CONTEXT_TOKENS_MIN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Sizes of the two tables, ascending, and which shapes an instance can compute."""

    prefill_rows: tuple[int, ...]
    """Tokens of a chunk."""
    prefill_columns: tuple[int, ...]
    """Tokens before it."""
    decode_rows: tuple[int, ...]
    """Batches."""
    decode_columns: tuple[int, ...]
    """Mean contexts."""
    reach_tokens: int
    """The longest sequence."""
    kv_blocks: int

    def prefill_shapes(self) -> Iterator[tuple[int, int, IterationShape]]:
        """Row, column and shape of each cell that can be measured. No two of one length follow each
        other.
        """
        for j, past in enumerate(self.prefill_columns):
            for i, tokens in enumerate(self.prefill_rows):
                if past + tokens <= self.reach_tokens:
                    yield i, j, IterationShape(prefill_tokens=tokens, prefill_past_tokens=past)

    def decode_shapes(self) -> Iterator[tuple[int, int, IterationShape]]:
        """Row, column and shape of each cell that can be measured."""
        for i, batch in enumerate(self.decode_rows):
            for j, context in enumerate(self.decode_columns):
                if batch * -(-context // BLOCK_TOKENS) <= self.kv_blocks:
                    yield i, j, IterationShape(decode_batch=batch, decode_context_tokens=context)


def survey_axes(
    *,
    context_tokens_max: int,
    batch_max: int,
    kv_tokens: int,
    prefill_tokens_max: int,
    coarse: bool = False,
    decodes: bool = True,
    pasts: bool = True,
) -> Axes:
    """The sizes to measure of an instance with these bounds; `coarse`: few of them. An instance
    without `decodes` ends each request with its prompt, one without `pasts` computes it at once.
    """
    kv_blocks = kv_tokens // BLOCK_TOKENS
    reach = max(min(context_tokens_max, kv_blocks * BLOCK_TOKENS), 1)
    chunk = max(min(prefill_tokens_max, reach), 1)
    batch_until = COARSE if coarse else DOUBLE_UNTIL_BATCH
    for double_until in (COARSE,) if coarse else DOUBLE_UNTIL_TOKENS:
        axes = Axes(
            prefill_rows=_rows(chunk, COARSE if coarse else chunk),
            prefill_columns=_pasts(reach, chunk, double_until) if pasts else (0,),
            decode_rows=_rows(batch_max, batch_until) if decodes else (),
            decode_columns=_sizes(CONTEXT_TOKENS_MIN, reach, double_until),
            reach_tokens=reach,
            kv_blocks=kv_blocks,
        )
        if _count(axes) <= SHAPES_MAX:
            break
    return axes


def _count(axes: Axes) -> int:
    return sum(1 for _ in axes.prefill_shapes()) + sum(1 for _ in axes.decode_shapes())


def _sizes(least: int, most: int, double_until: int) -> tuple[int, ...]:
    """From `least` in doubling and quadrupling steps to `most`, which is one of them always."""
    sizes = []
    size = least
    while size < most:
        sizes.append(size)
        size *= 2 if size < double_until else 4
    return (*sizes, most)


def _rows(most: int, double_until: int) -> tuple[int, ...]:
    sizes = _sizes(1, most, double_until)
    return tuple(sorted({*sizes, STEP_ROWS})) if min(most, double_until) > STEP_ROWS else sizes


def _pasts(reach: int, chunk: int, double_until: int) -> tuple[int, ...]:
    """Sizes of the cache before a chunk. Among them is the largest that the largest chunk fits
    behind, so that little of its row has to be filled, and `reach`, which is filled in all rows:
    beyond its last column a table answers in proportion to the size, and most of a prefill's time
    is not.
    """
    if reach <= PAST_TOKENS_MIN:
        return (0,)
    sizes = {0, *_sizes(PAST_TOKENS_MIN, reach, double_until)}
    if reach - chunk > PAST_TOKENS_MIN:
        sizes.add(reach - chunk)
    return tuple(sorted(sizes))
