"""The memory of one instance's KV cache: a virtual range per layer cache, pages under it as used.

A range is reserved once, far larger than its blocks; growing exposes more of it, shrinking gives
the pages of the tail back to the system, and neither copies a token that stays in place. `instance`
calls it between two steps; block numbers come from `blocks`. The first block of the memory is
scratch for padding, so block b of the pool is block b + FIRST_BLOCK here.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh.domain.errors import OutOfMemory
from mesh_nodes.engines.openvino.paged_attention import KEY_CACHE, VALUE_CACHE

FIRST_BLOCK = 1
_MAP_NORESERVE = 0x4000
"""Linux: the range counts against no commit limit; the mmap module has no name for it."""
_BACKING_BYTE = 0x11
"""Repeated, a small normal number in f16 and f32, and so a harmless scale of u8 blocks."""
_ELEMENTS = {"f16": np.float16, "f32": np.float32, "u8": np.uint8, "i8": np.int8}


@dataclass(frozen=True, slots=True)
class _LayerCache:
    port: ov.ConstOutput
    memory: mmap.mmap
    array: npt.NDArray[Any]
    """[FIRST_BLOCK + range blocks, kv heads, block tokens, head size]"""
    block_bytes: int


class KvCache:
    """Key and value caches of all layers, bound to one infer request."""

    def __init__(
        self,
        compiled: ov.CompiledModel,
        request: ov.InferRequest,
        *,
        blocks: int,
        range_blocks: int,
    ) -> None:
        """Raises OutOfMemory when the address space cannot be had."""
        self._request = request
        self._layers = [
            _reserve(port, FIRST_BLOCK + range_blocks)
            for port in compiled.inputs
            if port.any_name.startswith((KEY_CACHE, VALUE_CACHE))
        ]
        self.range_blocks = range_blocks
        self.block_bytes = sum(layer.block_bytes for layer in self._layers)
        self.blocks = 0
        self._backed = np.zeros(range_blocks, np.bool_)
        """Blocks that `back` has written and no shrink has given back since."""
        self._expose(blocks)

    def resize(self, blocks: int, moves: Mapping[int, int]) -> None:
        """Move blocks (old number to new), then grow or shrink to `blocks`, at most the range."""
        if moves:
            old = [FIRST_BLOCK + block for block in moves]
            new = [FIRST_BLOCK + block for block in moves.values()]
            for layer in self._layers:
                layer.array[new] = layer.array[old]
        before = self.blocks
        self._expose(blocks)
        for layer in self._layers:
            kept, had = FIRST_BLOCK + blocks, FIRST_BLOCK + before
            _give_back(layer.memory, kept * layer.block_bytes, had * layer.block_bytes)
        self._backed[blocks:] = False

    def back(self, blocks: Sequence[int]) -> None:
        """Put memory under blocks that no request holds. Fresh ones all read from the system's one
        page of zeros, far quicker than a cache with tokens in it.
        """
        fresh = [FIRST_BLOCK + block for block in blocks if not self._backed[block]]
        for layer in self._layers:
            layer.array.view(np.uint8)[fresh] = _BACKING_BYTE
        self._backed[blocks] = True

    def close(self) -> None:
        """Give every page back at once, whoever still holds the tensors."""
        for layer in self._layers:
            layer.memory.madvise(mmap.MADV_DONTNEED)
        self._layers = []
        self.blocks = 0

    def _expose(self, blocks: int) -> None:
        for layer in self._layers:
            shared = ov.Tensor(layer.array[: FIRST_BLOCK + blocks], shared_memory=True)
            self._request.set_tensor(layer.port, shared)
        self.blocks = blocks


def _reserve(port: ov.ConstOutput, range_blocks: int) -> _LayerCache:
    element = np.dtype(_ELEMENTS[port.element_type.get_type_name()])
    block_shape = [dimension.get_length() for dimension in list(port.partial_shape)[1:]]
    block_bytes = int(np.prod(block_shape)) * element.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, range_blocks * block_bytes, flags=flags)
    except OSError as error:
        raise OutOfMemory(
            f"a range of {range_blocks} KV blocks of {block_bytes} bytes cannot be reserved: "
            f"{error.strerror}",
            hint="lower the context limit or the batch, or raise the address space limit",
        ) from error
    array = np.frombuffer(memory, element).reshape([range_blocks, *block_shape])
    return _LayerCache(port, memory, array, block_bytes)


def _give_back(memory: mmap.mmap, begin_bytes: int, end_bytes: int) -> None:
    """Whole pages only: one that the last block in force shares with the next one stays."""
    begin = -(-begin_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    end = min(-(-end_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, len(memory))
    if begin < end:
        memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
