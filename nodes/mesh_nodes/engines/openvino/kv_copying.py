"""A KV cache that is resized by a copy: memory of exactly its size, allocated anew each time.

This is how LLM-Mesh's engine does it (§6), one layer after the other, so that no more than one
layer's blocks are there twice. See `kv_cache` for when it is used.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh_nodes.engines.openvino.blocks import Blocks
from mesh_nodes.engines.openvino.kv_layers import (
    FIRST_BLOCK,
    LayerCache,
    back_blocks,
    layer_caches,
    runs,
)
from mesh_nodes.engines.page_range import PageRange


class CopyingKvCache:
    """See `kv_cache.KvCache`."""

    def __init__(
        self, compiled: ov.CompiledModel, request: ov.InferRequest, *, blocks: int
    ) -> None:
        """Raises OutOfMemory when the addresses cannot be had."""
        self.dense = True
        self._request = request
        self._layers = layer_caches(compiled)
        self.block_bytes = sum(layer.block_bytes for layer in self._layers)
        self._blocks = blocks
        self._memory = [_allocate(layer, blocks) for layer in self._layers]
        for layer, (_, array) in zip(self._layers, self._memory, strict=True):
            self._bind(layer, array)
        self._backed = np.zeros(blocks, np.bool_)

    @property
    def held_bytes(self) -> int:
        """All of it, touched or not."""
        return self._blocks * self.block_bytes

    def claim(self, free: Blocks, count: int) -> Blocks:
        """The lowest, which are below the size in force: so are all that are in use."""
        return free[:count]

    def back(self, blocks: Blocks) -> None:
        back_blocks([array for _, array in self._memory], blocks[~self._backed[blocks]])
        self._backed[blocks] = True

    def resize(self, blocks: int, in_use: Blocks, places: Blocks) -> None:
        if blocks == self._blocks:
            return
        fresh = [_allocate(layer, blocks) for layer in self._layers]
        pieces = runs(in_use, places)
        for number, layer in enumerate(self._layers):
            memory, array = self._memory[number]
            for begin, end in pieces:
                old, new = FIRST_BLOCK + int(in_use[begin]), FIRST_BLOCK + int(places[begin])
                fresh[number][1][new : new + end - begin] = array[old : old + end - begin]
            self._bind(layer, fresh[number][1])
            memory.close()
            self._memory[number] = fresh[number]
        self._blocks = blocks
        self._backed = np.zeros(blocks, np.bool_)

    def trim(self, kept: Blocks, keep: int) -> None:
        """It keeps its size."""

    def rest(self, kept: Blocks) -> None:
        """It keeps its size."""

    def close(self) -> None:
        for memory, _ in self._memory:
            memory.close()
        self._memory = []
        self._blocks = 0

    def _bind(self, layer: LayerCache, array: npt.NDArray[Any]) -> None:
        self._request.set_tensor(layer.port, layer.tensor(array))


def _allocate(layer: LayerCache, blocks: int) -> tuple[PageRange, npt.NDArray[Any]]:
    memory = PageRange(layer.size_bytes(blocks))
    return memory, memory.array(layer.element, layer.shape(blocks), 0)
