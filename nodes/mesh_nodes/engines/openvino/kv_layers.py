"""What the KV caches of all layers look like, whoever owns their memory.

`kv_elastic` and `kv_copying` lay out memory by it. The first block of each cache is scratch for
padding, so block b of the pool is block b + FIRST_BLOCK here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh_nodes.engines.openvino.blocks import Blocks
from mesh_nodes.engines.openvino.paged_attention import KEY_CACHE, VALUE_CACHE
from mesh_nodes.engines.page_range import PAGE_BYTES

FIRST_BLOCK = 1
_BACKING_BYTE = 0x11
"""This byte, repeated, is a small normal number in f16, bf16 and f32, and so a harmless scale of u8
blocks.
"""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""By bytes. numpy knows not all of the plugin's elements, and nobody computes with them here."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys, or the values, of one layer."""

    port: ov.ConstOutput
    element: np.dtype[Any]
    block_shape: tuple[int, ...]
    """[kv heads, block tokens, head size]"""

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.block_shape)) * self.element.itemsize

    def shape(self, blocks: int) -> tuple[int, ...]:
        """The shape of a cache of so many blocks, with the scratch block besides."""
        return (FIRST_BLOCK + blocks, *self.block_shape)

    def tensor(self, array: npt.NDArray[Any]) -> ov.Tensor:
        """Over the array's memory, which has to be kept."""
        return ov.Tensor(array, ov.Shape(array.shape), self.port.element_type)

    def size_bytes(self, blocks: int) -> int:
        """What such a cache takes, in whole pages."""
        return -(-(FIRST_BLOCK + blocks) * self.block_bytes // PAGE_BYTES) * PAGE_BYTES


def layer_caches(compiled: ov.CompiledModel) -> list[LayerCache]:
    """Those that the compiled model takes as inputs."""
    return [
        LayerCache(
            port,
            np.dtype(_WORDS[port.element_type.size]),
            tuple(dimension.get_length() for dimension in list(port.partial_shape)[1:]),
        )
        for port in compiled.inputs
        if port.any_name.startswith((KEY_CACHE, VALUE_CACHE))
    ]


def back_blocks(arrays: Iterable[npt.NDArray[Any]], blocks: Blocks) -> None:
    """Write to all of these blocks, so that there is memory of their own under them."""
    for array in arrays:
        array.view(np.uint8)[FIRST_BLOCK + blocks] = _BACKING_BYTE


def runs(*numbers: Blocks) -> list[tuple[int, int]]:
    """Where these arrays of equal length rise by one, all of them: as [begin, end) of their
    indices."""
    if not numbers[0].size:
        return []
    breaks = np.zeros(numbers[0].size - 1, np.bool_)
    for array in numbers:
        breaks |= np.diff(array) != 1
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), numbers[0].size]
    return list(pairwise(edges))
