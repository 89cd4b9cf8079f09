"""A model's weights on their way between the device and host memory.

What a tensor is a view of is its storage: emptied and filled again, it leaves every tensor valid,
whoever holds it, at whatever address the memory comes back. No CUDA graph may have kept an old
one, so it needs `enforce_eager`. Before: `instance`, which sleeps and wakes. After: torch.
"""

import logging
import threading
from itertools import chain

import torch

log = logging.getLogger(__name__)


class Weights:
    """Of one model on one device, its buffers with them. Storages that tensors share count once.

    The host's copy stays when they go back to the device: nothing changes parameters, so the next
    sleep need only copy the buffers.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._away: list[torch.UntypedStorage] = []
        """Those that have been emptied."""
        self._sizes: list[int] = []
        """Of what stands in the host's copy, one after the other."""
        self._host: torch.Tensor | None = None
        self._copied = False
        self._reserving: threading.Thread | None = None

    @property
    def device_bytes(self) -> int:
        """What they hold of the device now; as much as a copy of them takes of the host."""
        return sum(storage.nbytes() for storage in self._storages())

    def reserve(self) -> None:
        """Take the host's memory for a copy now, beside whatever follows: to have its pages takes
        several times as long as to copy into them.
        """
        sizes = [storage.nbytes() for storage in self._storages()]

        def take() -> None:
            try:
                self._host = self._host_memory(sum(sizes))
                self._sizes = sizes
            except (RuntimeError, MemoryError):
                log.exception("no host memory for weights that are to sleep later")

        self._reserving = threading.Thread(target=take, name="mesh-reserve", daemon=True)
        self._reserving.start()

    def to_host(self) -> None:
        """See that the host has all of them, and give their memory on the device back.

        Raises RuntimeError, MemoryError when it cannot be done; they are in no known state then.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        self._away = self._storages()
        sizes = [storage.nbytes() for storage in self._away]
        changed = len(self._away)
        if sizes == self._sizes and self._copied:
            changed = len(self._storages(parameters=False))
        elif sizes != self._sizes:
            self._release()
            self._host, self._sizes = self._host_memory(sum(sizes)), sizes
        for storage, part in self._pairs()[-changed:] if changed else ():
            part.copy_(_as_bytes(storage), non_blocking=True)
        self._wait()
        self._copied = True
        for storage in self._away:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def to_device(self) -> None:
        """The way back. Raises torch.OutOfMemoryError, and what `to_host` raises."""
        for storage, part in self._pairs():
            storage.resize_(part.nbytes)
            _as_bytes(storage).copy_(part, non_blocking=True)
        self._wait()
        self._away = []

    def _storages(self, parameters: bool = True) -> list[torch.UntypedStorage]:
        """Those of parameters first; without these, such as only buffers have."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in chain(self._model.parameters(), self._model.buffers()):
            storage = tensor.untyped_storage()
            if storage.device.type == self._device.type and storage.nbytes():
                found.setdefault(storage.data_ptr(), storage)
        if not parameters:
            for tensor in self._model.parameters():
                found.pop(tensor.untyped_storage().data_ptr(), None)
        return list(found.values())

    def _pairs(self) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
        """Each storage that is away with its part of the host's copy."""
        assert self._host is not None
        return list(zip(self._away, self._host.split(self._sizes), strict=True))

    def _host_memory(self, size_bytes: int) -> torch.Tensor:
        """Locked to its pages where there is CUDA, so that copies go at the speed of the bus. Not
        by torch's own allocator, which rounds up to a power of two and keeps what it once had.
        """
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size_bytes, 0))
        else:
            memory.zero_()
        return memory

    def _release(self) -> None:
        """The host's copy, which is not what is wanted any more."""
        if self._host is not None and self._device.type == "cuda":
            _check(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))
        self._host = None

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _check(error: object) -> None:
    """Raises RuntimeError for what CUDA's runtime did not do."""
    torch.cuda.check_error(error)
