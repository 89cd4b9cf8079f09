"""The memory under an instance's KV blocks, and two of the ways of giving some of it back.

On a CPU the caches lie in a reserved range of addresses: pages come under blocks as they are
written, and a shrink gives those of free blocks back without moving a token. Where neither that nor
`kv_mapped` can be had, another size is another tensor, and what is in use is copied. Before:
`instance`, between two iterations. After: the system.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from mesh.domain.errors import OutOfMemory, UnsupportedModel
from mesh.domain.units import format_bytes
from mesh_nodes.engines.device_range import runs
from mesh_nodes.engines.page_range import PageRange

Moves = Sequence[tuple[int, int]]
"""Blocks of which the tokens go elsewhere: (from, to)."""
Replace = Callable[[torch.Tensor, torch.Tensor], None]
"""Have attention read and write the second instead of the first, which nobody may keep."""
_COPIED_AT_ONCE = 64
"""Blocks of one layer that are there three times while it is copied: a few MB."""


class KvMemory(Protocol):
    """Blocks are numbered as vLLM numbers them; block 0 is its own and never a request's."""

    dense: bool
    """Whether `resize` needs the blocks in use to have low numbers: 1 to the size in force."""
    stays: bool
    """Whether attention never has to use other tensors."""

    @property
    def held_bytes(self) -> int: ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """The buffer that vLLM asks for, for all blocks that there can ever be, as int8."""
        ...

    def bind(self, layers: list[torch.Tensor]) -> list[torch.Tensor]:
        """What vLLM has made of the buffer, one for each layer, blocks first; what attention is to
        read and write in their stead.
        """
        ...

    def taken(self, blocks: Iterable[int]) -> None:
        """These blocks are written from now on."""
        ...

    def back(self, blocks: Iterable[int]) -> None:
        """Put memory under blocks that are about to be read without having been written."""
        ...

    def check_room(self, blocks: int) -> None:
        """Raises OutOfMemory when a resize to so many blocks could not be made."""
        ...

    def resize(self, blocks: int, in_use: Iterable[int], moves: Moves, replace: Replace) -> None:
        """Hold no more than `blocks` blocks, those in use among them, after the moves have been
        made. Attention has to use other tensors from then on: it is told of each by `replace`.
        """
        ...


class CopyingKv:
    """Tensors as large as the size in force; another size is another tensor, layer by layer."""

    dense, stays = True, False

    def __init__(
        self, block_bytes: int, blocks: int, device: torch.device, free_bytes: Callable[[], int]
    ) -> None:
        """`block_bytes`: of one block in all layers together. `free_bytes`: of the device."""
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._free_bytes = free_bytes
        self._device = device
        self._tensors: list[torch.Tensor] = []

    @property
    def held_bytes(self) -> int:
        return self._blocks * self._block_bytes

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Shapes and strides without any memory."""
        return torch.empty(size_bytes, dtype=torch.int8, device="meta")

    def bind(self, layers: list[torch.Tensor]) -> list[torch.Tensor]:
        check_layout(layers, self._block_bytes)
        self._tensors = [self._zeros(layer, self._blocks) for layer in layers]
        return list(self._tensors)

    def taken(self, blocks: Iterable[int]) -> None:
        pass

    def back(self, blocks: Iterable[int]) -> None:
        pass

    def check_room(self, blocks: int) -> None:
        """One layer is there twice for a while, and some of its blocks three times: the most with
        the first one of a shrink, with the last one of a grow.
        """
        layers = len(self._tensors)
        grown_blocks = max(blocks - self._blocks, 0) * (layers - 1)
        copied_blocks = min(blocks, self._blocks, _COPIED_AT_ONCE)
        # vLLM's own block is in each layer, too.
        wanted_blocks = blocks + 1 + grown_blocks + copied_blocks
        wanted_bytes = wanted_blocks * self._block_bytes // layers
        if blocks != self._blocks and wanted_bytes > self._free_bytes():
            raise OutOfMemory(
                f"a KV cache of {blocks} blocks wants {format_bytes(wanted_bytes)} more, "
                f"{format_bytes(self._free_bytes())} are free"
            )

    def resize(self, blocks: int, in_use: Iterable[int], moves: Moves, replace: Replace) -> None:
        if blocks == self._blocks:
            return
        came_from = {new: old for old, new in moves}
        kept = sorted(in_use)
        sources = [came_from.get(block, block) for block in kept]
        for number, old in enumerate(self._tensors):
            new = self._zeros(old, blocks)
            for first in range(0, len(kept), _COPIED_AT_ONCE):
                some = slice(first, first + _COPIED_AT_ONCE)
                new[kept[some]] = old[sources[some]]
            self._tensors[number] = new
            replace(old, new)
            # Its memory goes at once, whoever still has the object.
            old.untyped_storage().resize_(0)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
        self._blocks = blocks

    def _zeros(self, like: torch.Tensor, blocks: int) -> torch.Tensor:
        """For so many blocks and vLLM's own."""
        shape = (blocks + 1, *like.shape[1:])
        return torch.empty_strided(
            shape, like.stride(), dtype=like.dtype, device=self._device
        ).zero_()


class ElasticKv:
    """Pages under the blocks that were written since they were last given back."""

    dense, stays = False, True

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: of one block in all layers together."""
        self._block_bytes = block_bytes
        self._range: PageRange
        self._buffer: torch.Tensor
        self._layers: list[tuple[int, int, torch.Tensor]] = []
        """Where each layer begins in the range, the bytes of its blocks, its tensor."""
        self._held: set[int] = set()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Zeros that take no memory yet, [size_bytes] of int8.

        Raises OutOfMemory when the addresses cannot be had.
        """
        self._range = PageRange(size_bytes)
        plain = self._range.array(np.dtype(np.int8), (size_bytes,), 0)
        self._buffer = torch.from_numpy(plain)
        return self._buffer

    def bind(self, layers: list[torch.Tensor]) -> list[torch.Tensor]:
        check_layout(layers, self._block_bytes)
        for tensor in layers:
            begin = tensor.data_ptr() - self._buffer.data_ptr()
            self._layers.append((begin, tensor.nbytes // tensor.shape[0], tensor))
        return layers

    @property
    def held_bytes(self) -> int:
        return len(self._held) * self._block_bytes

    def taken(self, blocks: Iterable[int]) -> None:
        self._held.update(blocks)

    def back(self, blocks: Iterable[int]) -> None:
        fresh = [block for block in blocks if block not in self._held]
        for _, _, tensor in self._layers:
            tensor[fresh] = 0
        self._held.update(fresh)

    def check_room(self, blocks: int) -> None:
        """Addresses are there already, memory comes later."""

    def resize(self, blocks: int, in_use: Iterable[int], moves: Moves, replace: Replace) -> None:
        """Never moves or replaces anything."""
        surplus = len(self._held) - blocks
        free = sorted(self._held.difference(in_use))[-surplus:] if surplus > 0 else []
        for first, end in runs(free):
            for begin, block_bytes, _ in self._layers:
                self._range.free_pages(begin + first * block_bytes, begin + end * block_bytes)
        self._held.difference_update(free)


def check_layout(layers: list[torch.Tensor], block_bytes: int) -> None:
    """Raises RuntimeError where the blocks of a layer do not lie one after the other, and
    UnsupportedModel where all layers' take another size than was booked.
    """
    taken_bytes = sum(tensor.nbytes // tensor.shape[0] for tensor in layers)
    if taken_bytes != block_bytes:
        raise UnsupportedModel(
            f"a KV block of this model takes {taken_bytes} bytes in vLLM and {block_bytes} by its "
            "config.json, by which nodes book",
            hint="mesh serves decoders that keep keys and values of all heads in every layer",
        )
    for tensor in layers:
        if tensor.stride(0) * tensor.itemsize != tensor.nbytes // tensor.shape[0]:
            raise RuntimeError(f"KV blocks lie apart: {tensor.stride()} of {tensor.shape}")
