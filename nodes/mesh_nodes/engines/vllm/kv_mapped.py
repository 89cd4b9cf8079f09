"""KV blocks in CUDA's virtual memory: a cache grows and shrinks where it is, under its addresses.

vLLM gets a range of addresses for all blocks that there can ever be, layers outermost, and memory
lies under blocks 0 to the size in force, layer by layer, in the driver's chunks of 2 MiB. A grow
maps more of them and moves nothing; a shrink moves those tokens alone whose blocks have numbers
above the new size, within the same tensors. `kv_memory` has the other ways. Before: `instance`,
between two iterations. After: `device_range`.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mesh.domain.errors import OutOfMemory
from mesh.domain.units import format_bytes
from mesh_nodes.engines.device_range import DeviceRange, Driver
from mesh_nodes.engines.vllm.footprint import KV_ROUNDING_CHUNKS
from mesh_nodes.engines.vllm.kv_memory import (
    CopyingKv,
    ElasticKv,
    KvMemory,
    Moves,
    Replace,
    check_layout,
)

_MOVES_AT_ONCE = 256
"""Blocks of one layer that are there twice while they move: 16 MiB of an 8B model."""


class MappedKv:
    """Implements `kv_memory.KvMemory`; what each call does is said there."""

    dense = stays = True

    def __init__(
        self,
        driver: Driver,
        block_bytes: int,
        blocks: int,
        device: torch.device,
        free_bytes: Callable[[], int],
    ) -> None:
        """`block_bytes`: of one block in all layers together. `free_bytes`: of the device."""
        self._driver = driver
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._device = device
        self._free_bytes = free_bytes
        self._range: DeviceRange
        self._buffer: torch.Tensor
        self._layers: list[tuple[int, int, torch.Tensor]] = []
        """Where each layer begins in the range, the bytes of its blocks, its tensor."""

    @property
    def device_bytes(self) -> int:
        """The device memory of the cache, including the spare chunks and those that it holds beyond
        the size in force.
        """
        return self._range.held_bytes

    @property
    def held_bytes(self) -> int:
        """Without what a footprint counts for chunks and vLLM's own block."""
        size_bytes = self._blocks * self._block_bytes
        counted_bytes = len(self._layers) * KV_ROUNDING_CHUNKS * self._range.chunk_bytes
        beyond_bytes = self.device_bytes - size_bytes - self._block_bytes - counted_bytes
        return size_bytes + max(beyond_bytes, 0)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Raises EngineError, OutOfMemory when addresses or a first chunk cannot be had."""
        self._range = DeviceRange(self._driver, size_bytes)
        # torch asks whose memory the first byte is.
        self._range.hold([0])
        self._buffer = tensor_at(self._range.address, size_bytes, self._device)
        return self._buffer

    def bind(self, layers: list[torch.Tensor]) -> list[torch.Tensor]:
        check_layout(layers, self._block_bytes)
        for tensor in layers:
            begin = tensor.data_ptr() - self._buffer.data_ptr()
            self._layers.append((begin, tensor.nbytes // tensor.shape[0], tensor))
        self._hold(self._blocks)
        self._buffer[: self._range.chunk_bytes].zero_()
        return layers

    def taken(self, blocks: Iterable[int]) -> None:
        """There is memory under all that may be taken."""

    def back(self, blocks: Iterable[int]) -> None:
        """As for `taken`."""

    def check_room(self, blocks: int) -> None:
        lacks_bytes = self._range.lacks_bytes(self._chunks(blocks))
        if blocks > self._blocks and lacks_bytes > self._free_bytes():
            raise OutOfMemory(
                f"a KV cache of {blocks} blocks wants {format_bytes(lacks_bytes)} more, "
                f"{format_bytes(self._free_bytes())} are free"
            )

    def resize(self, blocks: int, in_use: Iterable[int], moves: Moves, replace: Replace) -> None:
        """Never replaces a tensor. Raises OutOfMemory, EngineError of a grow alone, and nothing has
        changed; what a shrink cannot give back is tried again by the next resize.
        """
        for first in range(0, len(moves), _MOVES_AT_ONCE):
            some = moves[first : first + _MOVES_AT_ONCE]
            old, new = torch.tensor(some, device=self._device).unbind(1)
            for _, _, tensor in self._layers:
                tensor[new] = tensor[old]
        if blocks < self._blocks and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._hold(blocks)
        self._blocks = blocks

    def _hold(self, blocks: int) -> None:
        # A cache without blocks is that of an instance which sleeps: it keeps nothing at all.
        spare_max = len(self._layers) if blocks else 0
        chunk_bytes = self._range.chunk_bytes
        for first, end in self._range.hold(self._chunks(blocks), spare_max):
            # Another's bits may be no numbers, and attention multiplies by 0 what it masks.
            self._buffer[first * chunk_bytes : end * chunk_bytes].zero_()

    def _chunks(self, blocks: int) -> set[int]:
        """Those under so many blocks of each layer, and vLLM's own."""
        if not blocks:
            return set()
        size = self._range.chunk_bytes
        found: set[int] = set()
        for begin, block_bytes, _ in self._layers:
            end = begin + (blocks + 1) * block_bytes
            found.update(range(begin // size, -(-end // size)))
        return found


class _Memory:
    """What torch takes for an array on a GPU."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """[size_bytes] of int8 over memory that is not torch's."""
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, size_bytes), device=device)
    memory = (ctypes.c_byte * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int8)


def kv_memory(
    elastic: bool,
    driver: Driver | None,
    block_bytes: int,
    blocks: int,
    device: torch.device,
    free_bytes: Callable[[], int],
) -> KvMemory:
    """What lies under an instance's blocks: what need not be copied, if so asked and where it can
    be had.
    """
    if driver is not None:
        return MappedKv(driver, block_bytes, blocks, device, free_bytes)
    if elastic and device.type == "cpu":
        return ElasticKv(block_bytes)
    return CopyingKv(block_bytes, blocks, device, free_bytes)
