"""A range of the node's pool as an engine process has it: mapped, and pinned where there is CUDA.

Copies between pinned memory and the device go at the speed of the bus and beside kernels. What the
driver does not pin is used as it is, and the log says so. Before: `weights`. After: the kernel, and
the driver.
"""

import logging
import mmap
from contextlib import suppress
from typing import Any

import torch

from mesh.domain.errors import EngineError
from mesh_nodes.engines.cuda_driver import pin_host, pinning_library
from mesh_nodes.engines.vllm.messages import WHOLE, Range

log = logging.getLogger(__name__)


class PooledMemory:
    """The pool memory of one process, which maps one range at most and keeps it until it ends."""

    def __init__(self, descriptor: int, library: Any = None) -> None:
        """`library`: `cuda.bindings.driver`, or what stands in for it; None: nothing is pinned."""
        self._descriptor = descriptor
        self._library = library
        self._mapped: tuple[Range, torch.Tensor] | None = None
        self.pinned = False

    def map(self, where: Range) -> torch.Tensor:
        """Its bytes. Raises EngineError where they cannot be had."""
        if self._mapped is None:
            try:
                pages = mmap.mmap(self._descriptor, where.size_bytes, offset=where.offset)
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"the node's pool of weights cannot be mapped: {error}"
                ) from error
            with suppress(OSError):
                # Fewer pages to map and to pin, where the system has large ones for such files.
                pages.madvise(mmap.MADV_HUGEPAGE)
            memory = torch.frombuffer(pages, dtype=torch.uint8)
            self._pin(memory)
            self._mapped = where, memory
        held, memory = self._mapped
        if held.offset != where.offset:
            raise EngineError(f"this process maps the pool at {held.offset}, not at {where.offset}")
        return memory

    def mark_whole(self, where: Range) -> None:
        """All of it is there, for whoever maps it from now on."""
        mark = torch.frombuffer(bytearray(WHOLE), dtype=torch.uint8)
        self.map(where)[-len(WHOLE) :] = mark

    def _pin(self, memory: torch.Tensor) -> None:
        if self._library is None:
            return
        try:
            pin_host(self._library, memory.data_ptr(), memory.nbytes)
            self.pinned = True
        except EngineError as error:
            log.warning("weights move slowly, %d bytes are not pinned: %s", memory.nbytes, error)


def pooled_memory(descriptor: int, device: torch.device) -> PooledMemory:
    """Where the device is CUDA's, pinned by its driver."""
    return PooledMemory(descriptor, pinning_library() if device.type == "cuda" else None)
