"""CUDA's calls for virtual memory, on one device: addresses, memory, and this put under those; and
the one that pins memory of the host.

`cuda.bindings` comes with torch's builds for CUDA and is imported when a driver is opened, not
before: it is nothing to a node without a GPU. What the driver refuses is an EngineError with the
call's name and the driver's own word for it. Before: `device_range`; `vllm.device`, which asks
whether anything has begun to use CUDA. After: libcuda.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesh.domain.errors import EngineError, OutOfMemory

_UVM = "/dev/nvidia-uvm"

log = logging.getLogger(__name__)


class CudaDriver:
    """`library` is `cuda.bindings.driver`, or what stands in for it. Addresses and sizes that are
    given to it are whole chunks.
    """

    def __init__(self, library: Any, device: int) -> None:
        """Raises EngineError when the driver does not answer, or the device cannot do it."""
        self._library = library
        self._ask("cuInit", 0)
        feature = library.CUdevice_attribute
        supported = feature.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._ask("cuDeviceGetAttribute", supported, device):
            raise EngineError(f"GPU {device} has no virtual memory that can be managed")
        self._kind = library.CUmemAllocationProp()
        self._kind.type = library.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = library.CUmemAccessDesc()
        self._access.flags = library.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for location in (self._kind.location, self._access.location):
            location.type = library.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = device
        least = library.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.chunk_bytes = int(self._ask("cuMemGetAllocationGranularity", self._kind, least))
        """The least that memory comes in: 2 MiB on all devices so far."""

    def reserve(self, size_bytes: int) -> int:
        """Addresses without memory: where they begin."""
        return int(self._ask("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        """All that `reserve` gave, without memory again."""
        self._ask("cuMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int) -> Any:
        """Memory of the device, by a handle. Nothing is known of its content.

        Raises OutOfMemory.
        """
        return self._ask("cuMemCreate", size_bytes, self._kind, 0)

    def release(self, handle: Any) -> None:
        """Give it back to the device."""
        self._ask("cuMemRelease", handle)

    def map(self, address: int, size_bytes: int, handle: Any) -> None:
        """Put it under these addresses, of which nobody may use any until they are allowed."""
        self._ask("cuMemMap", address, size_bytes, 0, handle, 0)

    def allow(self, address: int, size_bytes: int) -> None:
        """Have the device read and write there. There may be many handles under it."""
        self._ask("cuMemSetAccess", address, size_bytes, [self._access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        """What one `map` has put there. No kernel may be using it: this waits for none."""
        self._ask("cuMemUnmap", address, size_bytes)

    def _ask(self, function: str, *arguments: Any) -> Any:
        return _ask(self._library, function, *arguments)


def pinning_library() -> Any:
    """What `pin_host` asks. None, and a line in the log, where there is none."""
    try:
        from cuda.bindings import driver

        return driver
    except (ImportError, RuntimeError) as error:
        log.warning("CUDA's driver cannot be asked to pin memory: %s", error)
        return None


def pin_host(library: Any, address: int, size_bytes: int) -> None:
    """Lock memory of the host to its pages, for the context of the thread that calls. It is undone
    by the end of the process. `library`: see `CudaDriver`. Raises OutOfMemory, EngineError.
    """
    _ask(library, "cuMemHostRegister", address, size_bytes, 0)


def _ask(library: Any, function: str, *arguments: Any) -> Any:
    code, *answer = getattr(library, function)(*arguments)
    if code != library.CUresult.CUDA_SUCCESS:
        lacks = code == library.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        kind = OutOfMemory if lacks else EngineError
        raise kind(f"the CUDA driver refuses {function}: {code.name}")
    return answer[0] if answer else None


def open_driver(device: int) -> CudaDriver | None:
    """None, and a line in the log, where there is no `cuda.bindings`, driver or such a device."""
    try:
        from cuda.bindings import driver

        return CudaDriver(driver, device)
    except (ImportError, RuntimeError, EngineError) as error:
        # A library that it does not find is a RuntimeError of its own kind.
        log.warning("CUDA's virtual memory cannot be used: %s", error)
        return None


def cuda_in_use(library: Any = None, descriptors: Path = Path("/proc/self/fd")) -> str:
    """By what one sees that this process has initialised CUDA, through whatever library; "" where
    nothing shows it. Asking initialises nothing. `library`: see `CudaDriver`.
    """
    for descriptor in descriptors.iterdir():
        with suppress(OSError):
            # The driver's initialisation opens it. So does NVML's, which no fork survives either.
            if os.readlink(descriptor) == _UVM:
                return f"{_UVM} is open"
    try:
        if library is None:
            from cuda.bindings import driver

            library = driver
        code, *context = library.cuCtxGetCurrent()
    except (ImportError, RuntimeError):
        return ""
    if code == library.CUresult.CUDA_ERROR_NOT_INITIALIZED:
        return ""
    return "it has a context" if context and int(context[0]) else f"its driver says {code.name}"
