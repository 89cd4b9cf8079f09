"""Device memory under the storages of a model's weights: torch's own, or a range that stays.

With torch's own, storages that have left come back elsewhere. In a `FixedMemory` each has its place
in one range of CUDA's virtual memory, under which memory comes and goes: whatever has kept an
address, as CUDA graphs do, stays right. vLLM's allocator for that, `device_allocator.cumem`, is not
used: it needs an extension that only builds for GPUs have, and empties a model all at once.
Before: `loader`, which has weights placed, and `weights`, which moves them. After: `device_range`,
torch.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import Protocol

import torch

from mesh.domain.units import format_bytes
from mesh_nodes.engines.device_range import DeviceRange, Driver
from mesh_nodes.engines.vllm.footprint import WEIGHTS_PIECE_CHUNKS
from mesh_nodes.engines.vllm.kv_mapped import tensor_at

_PLACE_BYTES = 512
"""Places begin at multiples of it, as torch's own do."""
_TWICE_BYTES_MAX = 256 * 2**20
"""So much of a model may be in its old place and in the new one while it is placed."""

log = logging.getLogger(__name__)

Storages = Sequence[torch.UntypedStorage]


class WeightsMemory(Protocol):
    """Storages come in one order, the same each time, and go in reverse."""

    def moves(self, storage: torch.UntypedStorage) -> bool:
        """Whether this one can leave at all."""
        ...

    def taken_bytes(self, storages: Storages) -> int:
        """The device memory that these take, which are all that are there."""
        ...

    def ends_bytes(self, storages: Storages, sizes_bytes: Sequence[int]) -> list[int]:
        """The device memory that all of these up to each one would take together."""
        ...

    def come(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Have memory under the next one. Raises RuntimeError, EngineError."""
        ...

    def go(self, storages: Storages) -> None:
        """Take the memory from under these, the last of those that are there."""
        ...


class TorchMemory:
    """Storages that are empty, or have memory of torch's own, anywhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def moves(self, storage: torch.UntypedStorage) -> bool:
        return True

    def taken_bytes(self, storages: Storages) -> int:
        return sum(storage.nbytes() for storage in storages)

    def ends_bytes(self, storages: Storages, sizes_bytes: Sequence[int]) -> list[int]:
        return list(accumulate(sizes_bytes))

    def come(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        storage.resize_(size_bytes)

    def go(self, storages: Storages) -> None:
        for storage in storages:
            storage.resize_(0)
        _give_back(self._device)


class FixedMemory:
    """A range of addresses for the parameters and buffers of one model, in this order."""

    def __init__(
        self,
        driver: Driver,
        model: torch.nn.Module,
        device: torch.device,
        piece_chunks: int = WEIGHTS_PIECE_CHUNKS,
    ) -> None:
        """Moves them there. A storage that something else uses as well stays where it is for good,
        since its other users could not be told.

        Raises OutOfMemory, EngineError: the model is of no use any more then.
        """
        found = by_storage((*model.parameters(), *model.buffers()), device).values()
        placed = [tensors for tensors in found if not _is_shared(tensors)]
        self._device = device
        self._end_bytes = sum(_place_bytes(tensors[0]) for tensors in placed)
        self._chunks = 0
        piece_bytes = piece_chunks * driver.chunk_bytes
        self._range = DeviceRange(driver, max(self._end_bytes, 1), piece_bytes)
        begin = twice_bytes = 0
        for tensors in placed:
            size_bytes = tensors[0].untyped_storage().nbytes()
            self._hold(begin + size_bytes)
            _place(tensors, tensor_at(self._range.address + begin, size_bytes, device))
            begin += _place_bytes(tensors[0])
            twice_bytes += size_bytes
            if twice_bytes > _TWICE_BYTES_MAX:
                twice_bytes = 0
                _give_back(device)
        _give_back(device)

    def moves(self, storage: torch.UntypedStorage) -> bool:
        return 0 <= self._begin(storage) < self._end_bytes

    def taken_bytes(self, storages: Storages) -> int:
        """Whole pieces count, whatever of them is in use."""
        return self._range.held_bytes

    def ends_bytes(self, storages: Storages, sizes_bytes: Sequence[int]) -> list[int]:
        ends = map(add, map(self._begin, storages), sizes_bytes)
        return [self._chunks_under(end) * self._range.chunk_bytes for end in ends]

    def come(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        self._hold(self._begin(storage) + size_bytes)

    def go(self, storages: Storages) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if storages:
            self._hold(self._begin(storages[0]))

    def _chunks_under(self, size_bytes: int) -> int:
        return -(-size_bytes // self._range.chunk_bytes)

    def _begin(self, storage: torch.UntypedStorage) -> int:
        return int(storage.data_ptr()) - self._range.address

    def _hold(self, size_bytes: int) -> None:
        """Have memory under so much of the range, from its beginning on, in whole pieces."""
        chunks = self._chunks_under(size_bytes)
        if chunks != self._chunks:
            self._range.hold(range(chunks))
            self._chunks = chunks


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def by_storage(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> dict[int, list[torch.Tensor]]:
    """Those that are on the device and not empty, by the addresses of their storages."""
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device.type and storage.nbytes():
            found.setdefault(storage.data_ptr(), []).append(tensor)
    return found


def _is_shared(tensors: list[torch.Tensor]) -> bool:
    storage = tensors[0].untyped_storage()
    # One use is this function's own.
    shared: bool = torch._C._storage_Use_Count(storage._cdata) > len(tensors) + 1
    if shared:
        log.warning("%s of weights cannot leave the device", format_bytes(storage.nbytes()))
    return shared


def _place_bytes(tensor: torch.Tensor) -> int:
    return -(-int(tensor.untyped_storage().nbytes()) // _PLACE_BYTES) * _PLACE_BYTES


def _place(tensors: list[torch.Tensor], there: torch.Tensor) -> None:
    """Have these use this memory, with the content of the storage that they share."""
    storage = there.untyped_storage()
    as_bytes(storage).copy_(as_bytes(tensors[0].untyped_storage()))
    # Tensors that were made for inference may be changed in no other mode.
    with torch.inference_mode():
        for tensor in tensors:
            tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
