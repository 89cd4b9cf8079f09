"""The memory of one instance's KV cache, and the two ways of resizing it behind one interface.

`instance` calls it between two steps; block numbers come from `blocks`. ELASTIC is the way: pages
come as blocks are written and go without a copy. COPYING allocates anew and copies what is in use:
it serves where the addresses for ELASTIC cannot be had, and to measure against. The first block of
each layer's cache is scratch for padding: block b of the pool is block b + FIRST_BLOCK here.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import openvino as ov

from mesh.domain.errors import OutOfMemory
from mesh.domain.values import dataclass
from mesh_nodes.engines.openvino.blocks import Blocks, runs
from mesh_nodes.engines.openvino.held_blocks import HeldBlocks
from mesh_nodes.engines.openvino.paged_attention import KEY_CACHE, VALUE_CACHE
from mesh_nodes.engines.page_range import PAGE_BYTES, PageRange

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

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal where the same bytes mean the same."""
        # By its name: an element type of OpenVINO keeps its port, and that the compiled model.
        return self.port.any_name, self.port.element_type.get_type_name(), self.block_shape

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
    """Those that the compiled model takes as inputs, in the same order for all that are compiled
    from one model.
    """
    caches = [
        LayerCache(
            port,
            np.dtype(_WORDS[port.element_type.size]),
            tuple(dimension.get_length() for dimension in list(port.partial_shape)[1:]),
        )
        for port in compiled.inputs
        if port.any_name.startswith((KEY_CACHE, VALUE_CACHE))
    ]
    return sorted(caches, key=lambda layer: str(layer.port.any_name))


def back_blocks(arrays: Iterable[npt.NDArray[Any]], blocks: Blocks) -> None:
    """Write to all of these blocks, so that there is memory of their own under them."""
    for array in arrays:
        array.view(np.uint8)[FIRST_BLOCK + blocks] = _BACKING_BYTE


def layout_of(layers: Iterable[LayerCache]) -> str:
    """The elements of a block as `read_block` has them, the layers one after the other."""
    return " ".join([f"{layer.port.element_type}{list(layer.block_shape)}" for layer in layers])


def read_block(arrays: Iterable[npt.NDArray[Any]], block: int) -> bytes:
    """A copy of a block's pages in all layers."""
    return b"".join([array[FIRST_BLOCK + block].tobytes() for array in arrays])


def write_block(arrays: Iterable[npt.NDArray[Any]], block: int, pages: bytes) -> None:
    """What `read_block` gave."""
    begin, flat = 0, np.frombuffer(pages, np.uint8)
    for array in arrays:
        into = array[FIRST_BLOCK + block].view(np.uint8).reshape(-1)
        into[:] = flat[begin : begin + into.size]
        begin += into.size


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
    """A reserved range of addresses, with pages under the blocks that hold tokens.

    The model sees the whole range from the start, so a resize changes nothing for it: the size in
    force is a number in the block pool, and a shrink gives pages of free blocks back, wherever they
    lie. No token moves, unless blocks do not cover whole pages: then those of the tail move down
    first.
    """

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
        self._kinds = [layer.kind for layer in layers]
        self.bind(compiled, request)
        self.block_bytes = sum(layer.block_bytes for layer in layers)
        self.layout = layout_of(layers)
        self.dense = any(layer.block_bytes % PAGE_BYTES for layer in layers)
        self._backed = np.zeros(range_blocks, np.bool_)
        """The blocks that `back` has written and that hold pages since."""
        self._spans = [(b, layer.block_bytes) for layer, b in zip(layers, begins, strict=True)]
        self._reach = max(-(-PAGE_BYTES // layer.block_bytes) for layer in layers)
        self._held = self._holding()

    def suits(self, compiled: ov.CompiledModel) -> bool:
        """Whether the model's caches are such."""
        return [layer.kind for layer in layer_caches(compiled)] == self._kinds

    def bind(self, compiled: ov.CompiledModel, request: ov.InferRequest) -> None:
        for layer, array in zip(layer_caches(compiled), self._arrays, strict=True):
            request.set_tensor(layer.port, layer.tensor(array))

    def unbind(self) -> None:
        """The request is the only one that knows of it."""

    @property
    def held_bytes(self) -> int:
        """Without the scratch block."""
        return self._held.count * self.block_bytes

    def claim(self, free: Blocks, count: int) -> Blocks:
        """Waits, for a slice at most, where no free block is left but those just given back."""
        return self._held.claim(free, count)

    def read(self, block: int) -> bytes:
        return read_block(self._arrays, block)

    def write(self, block: int, pages: bytes) -> None:
        write_block(self._arrays, block, pages)

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

    def keep(self, blocks: Blocks) -> None:
        """Give the pages of all other blocks back at once; where blocks cover whole pages."""
        self._held.close()
        kept = (-1, *(FIRST_BLOCK + blocks).tolist(), FIRST_BLOCK + self._backed.size)
        gaps = [(last + 1, block) for last, block in pairwise(kept) if last + 1 < block]
        for begin, block_bytes in self._spans:
            for first, end in gaps:
                self._range.free_pages(begin + first * block_bytes, begin + end * block_bytes)
        self._backed[:] = False
        self._held = self._holding()
        self._held.hold(blocks)

    def close(self) -> None:
        self._held.close()
        self._range.close()
        self._arrays = []

    def _holding(self) -> HeldBlocks:
        """None of the blocks."""
        return HeldBlocks(
            self._backed.size,
            slice_blocks=max(_SLICE_BYTES // self.block_bytes, 1),
            shared_blocks=self._reach if self.dense else 0,
            free_pages=partial(_free_pages, self._range, self._spans, self._backed),
        )


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


class CopyingKvCache:
    """Memory of exactly its size, allocated anew each time. This is how LLM-Mesh's engine resizes
    (§6), one layer after the other, so that no more than one layer's blocks are there twice.
    """

    def __init__(
        self, compiled: ov.CompiledModel, request: ov.InferRequest, *, blocks: int
    ) -> None:
        """Raises OutOfMemory when the addresses cannot be had."""
        self.dense = True
        self._request: ov.InferRequest | None
        self._layers = layer_caches(compiled)
        self.block_bytes = sum(layer.block_bytes for layer in self._layers)
        self.layout = layout_of(self._layers)
        self._blocks = blocks
        self._memory = [_allocate(layer, blocks) for layer in self._layers]
        self.bind(compiled, request)
        self._backed = np.zeros(blocks, np.bool_)

    def bind(self, compiled: ov.CompiledModel, request: ov.InferRequest) -> None:
        self._layers, self._request = layer_caches(compiled), request
        for layer, (_, array) in zip(self._layers, self._memory, strict=True):
            self._bind(layer, array)

    def unbind(self) -> None:
        self._request = None

    @property
    def held_bytes(self) -> int:
        """All of it, touched or not."""
        return self._blocks * self.block_bytes

    def claim(self, free: Blocks, count: int) -> Blocks:
        """The lowest, which are below the size in force: so are all that are in use."""
        return free[:count]

    def read(self, block: int) -> bytes:
        return read_block([array for _, array in self._memory], block)

    def write(self, block: int, pages: bytes) -> None:
        write_block([array for _, array in self._memory], block, pages)

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
        if self._request is not None:
            self._request.set_tensor(layer.port, layer.tensor(array))


def _allocate(layer: LayerCache, blocks: int) -> tuple[PageRange, npt.NDArray[Any]]:
    memory = PageRange(layer.size_bytes(blocks))
    return memory, memory.array(layer.element, layer.shape(blocks), 0)


log = logging.getLogger(__name__)


class KvResize(StrEnum):
    """How a KV cache grows and shrinks."""

    ELASTIC = "elastic"
    COPYING = "copying"


class KvCache(Protocol):
    """Key and value caches of all layers, bound to one infer request at most."""

    block_bytes: int
    layout: str
    """Equal for caches that can take each other's blocks."""
    dense: bool
    """Whether a shrink to n blocks needs those in use to be below n."""

    @property
    def held_bytes(self) -> int:
        """What it takes of the system's memory. May be read from any thread."""
        ...

    def bind(self, compiled: ov.CompiledModel, request: ov.InferRequest) -> None:
        """This request reads and writes it from now on. Raises RuntimeError where the model keeps
        keys and values in another way than the one that it was made for.
        """
        ...

    def unbind(self) -> None:
        """Keep nothing of the request and its model."""
        ...

    def claim(self, free: Blocks, count: int) -> Blocks:
        """Choose so many of these free blocks, which are in ascending order, to be written."""
        ...

    def read(self, block: int) -> bytes:
        """A copy of a block, `block_bytes` long."""
        ...

    def write(self, block: int, pages: bytes) -> None:
        """Fill a block that has been claimed with what `read` gave of another one."""
        ...

    def back(self, blocks: Blocks) -> None:
        """Put memory under blocks that no request holds. Fresh ones all read from the system's one
        page of zeros, far quicker than a cache with tokens in it.
        """
        ...

    def resize(self, blocks: int, in_use: Blocks, places: Blocks) -> None:
        """Grow or shrink to `blocks`; tokens of block in_use[i] are in block places[i] afterwards.

        Where `places` differs from `in_use`, the place is free. Raises OutOfMemory, and then
        nothing has changed.
        """
        ...

    def trim(self, kept: Blocks, keep: int) -> None:
        """No more blocks than `keep` are to take memory, but for those to be `kept`. May be called
        from any thread.
        """
        ...

    def rest(self, kept: Blocks) -> None:
        """No request is left: memory is wanted for none of the other blocks, for now."""
        ...

    def close(self) -> None:
        """Give every page back at once, whoever still holds the tensors."""
        ...


def bind_kv_cache(
    how: KvResize,
    compiled: ov.CompiledModel,
    request: ov.InferRequest,
    *,
    blocks: int,
    range_blocks: int,
) -> KvCache:
    """A cache of `blocks` that can grow to `range_blocks`; one that copies where the system has no
    addresses for a range. Raises OutOfMemory when there are none for the blocks, either.
    """
    if how is KvResize.ELASTIC:
        try:
            return ElasticKvCache(compiled, request, range_blocks=range_blocks)
        except OutOfMemory as error:
            log.warning("resizing this KV cache will copy it: %s", error.message)
    return CopyingKvCache(compiled, request, blocks=blocks)
