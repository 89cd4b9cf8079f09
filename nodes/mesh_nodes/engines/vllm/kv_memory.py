"""The memory under an instance's KV blocks, and whether any of it can be given back.

On a CPU the caches lie in a reserved range of addresses: pages come under blocks as they are
written, and a shrink gives those of free blocks back without moving a token. Elsewhere vLLM's
tensors stay as large as they were made, and the bound on blocks is a bound on their use alone.
Before: `instance`, between two iterations. After: the system.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch

from mesh_nodes.engines.page_range import PageRange


class KvMemory(Protocol):
    """Blocks are numbered as vLLM numbers them."""

    @property
    def held_bytes(self) -> int: ...

    def taken(self, blocks: Iterable[int]) -> None:
        """These blocks are written from now on."""
        ...

    def back(self, blocks: Iterable[int]) -> None:
        """Put memory under blocks that are about to be read without having been written."""
        ...

    def trim(self, kv_blocks: int, in_use: Iterable[int]) -> None:
        """Hold no more than `kv_blocks` blocks, those in use among them."""
        ...


class FixedKv:
    """All of it, from the load to the unload."""

    def __init__(self, size_bytes: int) -> None:
        self.held_bytes = size_bytes

    def taken(self, blocks: Iterable[int]) -> None:
        pass

    def back(self, blocks: Iterable[int]) -> None:
        pass

    def trim(self, kv_blocks: int, in_use: Iterable[int]) -> None:
        pass


class ElasticKv:
    """Pages under the blocks that were written since they were last given back."""

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes`: of one block in all layers together. Before anything else, vLLM calls
        `allocate`, and `bind` tells what it made of that.
        """
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

    def bind(self, layers: list[torch.Tensor]) -> None:
        """Each layer's part of the buffer, blocks first. Raises RuntimeError for a layout in which
        the blocks of a layer do not lie one after the other.
        """
        for tensor in layers:
            block_bytes = tensor.nbytes // tensor.shape[0]
            if tensor.stride(0) * tensor.itemsize != block_bytes:
                raise RuntimeError(f"KV blocks lie apart: {tensor.stride()} of {tensor.shape}")
            begin = tensor.data_ptr() - self._buffer.data_ptr()
            self._layers.append((begin, block_bytes, tensor))

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

    def trim(self, kv_blocks: int, in_use: Iterable[int]) -> None:
        surplus = len(self._held) - kv_blocks
        if surplus <= 0:
            return
        free = sorted(self._held.difference(in_use))[-surplus:]
        for first, end in runs(free):
            for begin, block_bytes, _ in self._layers:
                self._range.give_back(begin + first * block_bytes, begin + end * block_bytes)
        self._held.difference_update(free)


def runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbours as one: (first, last + 1) of each run of ascending numbers."""
    first = previous = None
    for number in numbers:
        if first is None or previous is None:
            first = number
        elif number != previous + 1:
            yield first, previous + 1
            first = number
        previous = number
    if first is not None and previous is not None:
        yield first, previous + 1
