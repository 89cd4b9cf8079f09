"""A KV cache that is resized without a copy: a reserved range, pages under the blocks that hold.

The model sees the whole range from the start, so a resize changes nothing for it: the size in force
is a number in the block pool, and a shrink gives pages of free blocks back, wherever they lie. No
token moves, unless blocks do not cover whole pages: then those of the tail move down first.
"""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh_nodes.engines.openvino.blocks import Blocks
from mesh_nodes.engines.openvino.held_blocks import HeldBlocks
from mesh_nodes.engines.openvino.kv_layers import FIRST_BLOCK, back_blocks, layer_caches
from mesh_nodes.engines.page_range import PAGE_BYTES, PageRange

Spans = Sequence[tuple[int, int]]
"""Where each cache begins in the range, and the bytes of its blocks."""
_SLICE_BYTES = 32 * 2**20
"""This much is given back at once, in about 20 ms with its pauses. Smaller slices take longer as a
whole.
"""
_PAUSE = 2.0
"""In times of how long the system's calls took: iterations lose a third of a core to them."""
_PAUSE_S = 0.001
"""A thread that made one call after the other would hardly let others have the interpreter between
them. Calls that took longer than this waited themselves.
"""
_REST_S = 0.25
"""A request that comes this soon after the last one finds the blocks' pages in place."""


class ElasticKvCache:
    """See `kv_cache.KvCache`."""

    def __init__(
        self, compiled: ov.CompiledModel, request: ov.InferRequest, *, range_blocks: int
    ) -> None:
        """Raises OutOfMemory when the addresses cannot be had."""
        layers = layer_caches(compiled)
        sizes = [layer.size_bytes(range_blocks) for layer in layers]
        self._range = PageRange(sum(sizes))
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        self._arrays = [
            self._range.array(layer.element, layer.shape(range_blocks), begin)
            for layer, begin in zip(layers, begins, strict=True)
        ]
        for layer, array in zip(layers, self._arrays, strict=True):
            request.set_tensor(layer.port, layer.tensor(array))
        self.block_bytes = sum(layer.block_bytes for layer in layers)
        self.dense = any(layer.block_bytes % PAGE_BYTES for layer in layers)
        self._backed = np.zeros(range_blocks, np.bool_)
        """The blocks that `back` has written and that hold pages since."""
        spans = [(begin, layer.block_bytes) for layer, begin in zip(layers, begins, strict=True)]
        reach = max(-(-PAGE_BYTES // layer.block_bytes) for layer in layers)
        self._held = HeldBlocks(
            range_blocks,
            slice_blocks=max(_SLICE_BYTES // self.block_bytes, 1),
            shared_blocks=reach if self.dense else 0,
            free_pages=partial(_free_pages, self._range, spans, self._backed),
        )

    @property
    def held_bytes(self) -> int:
        """Without the scratch block."""
        return self._held.count * self.block_bytes

    def claim(self, free: Blocks, count: int) -> Blocks:
        """Waits, for a slice at most, where no free block is left but those just given back."""
        return self._held.claim(free, count)

    def back(self, blocks: Blocks) -> None:
        back_blocks(self._arrays, blocks[~self._backed[blocks]])
        self._backed[blocks] = True

    def resize(self, blocks: int, in_use: Blocks, places: Blocks) -> None:
        moved = in_use != places
        if moved.any():
            self._held.hold(places[moved])
            pairs = zip(
                (FIRST_BLOCK + in_use[moved]).tolist(),
                (FIRST_BLOCK + places[moved]).tolist(),
                strict=True,
            )
            for old, new in pairs:
                for array in self._arrays:
                    array[new] = array[old]
        self.trim(places, keep=blocks)

    def trim(self, kept: Blocks, keep: int) -> None:
        self._held.trim(kept, keep=max(keep, kept.size))

    def rest(self, kept: Blocks) -> None:
        self._held.trim(kept, keep=kept.size, after_s=_REST_S)

    def close(self) -> None:
        self._held.close()
        self._range.close()
        self._arrays = []


def _free_pages(
    pages: PageRange, spans: Spans, backed: npt.NDArray[np.bool_], first: int, end: int
) -> None:
    """The pages of these blocks, in all layers. No method, since a cache that its own parts refer
    to would outlive its last user until the garbage is collected.
    """
    backed[first:end] = False
    owed_s = 0.0
    for begin_bytes, block_bytes in spans:
        start_s = time.perf_counter()
        pages.free_pages(
            begin_bytes + (FIRST_BLOCK + first) * block_bytes,
            begin_bytes + (FIRST_BLOCK + end) * block_bytes,
        )
        owed_s += _PAUSE * (time.perf_counter() - start_s)
        if owed_s >= _PAUSE_S:
            time.sleep(_PAUSE_S)
            owed_s = 0.0
