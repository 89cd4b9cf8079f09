"""A driver library like CUDA's for virtual memory and pinning, over memory of this process.

Addresses are reserved without access, memory is a part of one anonymous file, and mapping maps it:
what reads or writes where there is none, or where it was not allowed, ends the process. Fresh
memory holds what was last written there. Each call answers with a code, and does nothing where it
is not success; misuse, which the real one might let pass, is an AssertionError.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from mesh_nodes.engines.device_range import runs

_MAP_FIXED, _MAP_SHARED, _MAP_NORESERVE = 0x10, 0x01, 0x4000
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Code(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_UNKNOWN = 999


def _names(**names: int) -> Any:
    return SimpleNamespace(**names)


class StandInDriver:
    """A device of so many chunks. `fails` is asked by the call's name before each one."""

    CUresult = Code
    CUdevice_attribute = _names(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemAllocationType = _names(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = _names(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = _names(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = _names(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(
        self,
        chunks: int,
        chunk_bytes: int = 4 * mmap.PAGESIZE,
        fails: Callable[[str], bool] = lambda function: False,
        manages: bool = True,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.fails = fails
        self._manages = manages
        self._file = os.memfd_create("device")
        os.ftruncate(self._file, chunks * chunk_bytes)
        self._free = list(range(chunks))
        self.handles: dict[int, list[int]] = {}
        """Memory that is somebody's: the chunks of each piece, by the piece's first one."""
        self.mapped: dict[int, int] = {}
        """The piece under each address that it was mapped at."""
        self._backed: set[int] = set()
        """The addresses of chunks that have memory."""
        self.allowed: set[int] = set()
        """Those of chunks that may be used."""
        self.reserved: dict[int, int] = {}
        """Bytes of each range, by its address."""
        self.pinned: dict[int, int] = {}
        """Bytes of the host that are locked to their pages, by their addresses."""

    def CUmemAllocationProp(self) -> Any:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    @property
    def free_bytes(self) -> int:
        return len(self._free) * self.chunk_bytes

    def cuInit(self, flags: int) -> tuple[Code]:  # noqa: N802
        return (self._code("cuInit"),)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Code, int]:  # noqa: N802
        return self._code("cuDeviceGetAttribute"), int(self._manages)

    def cuMemGetAllocationGranularity(self, kind: Any, which: int) -> tuple[Code, int]:  # noqa: N802
        assert kind.location.type == 1
        return self._code("cuMemGetAllocationGranularity"), self.chunk_bytes

    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[Code, int]:
        assert size % self.chunk_bytes == 0
        if code := self._code("cuMemAddressReserve"):
            return code, 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        # As the device's addresses are, a multiple of the granularity.
        begin = _libc.mmap(None, size + self.chunk_bytes, _NONE, flags, -1, 0)
        begin = -(-begin // self.chunk_bytes) * self.chunk_bytes
        self.reserved[begin] = size
        return code, begin

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Code]:  # noqa: N802
        assert self.reserved[address] == size
        assert not any(address <= at < address + size for at in self.mapped), "memory is left"
        if code := self._code("cuMemAddressFree"):
            return (code,)
        del self.reserved[address]
        assert _libc.munmap(address, size) == 0
        return (code,)

    def cuMemCreate(self, size: int, kind: Any, flags: int) -> tuple[Code, int]:  # noqa: N802
        assert size % self.chunk_bytes == 0
        chunks = size // self.chunk_bytes
        if self._code("cuMemCreate") or len(self._free) < chunks:
            return Code.CUDA_ERROR_OUT_OF_MEMORY, -1
        taken = sorted(self._free.pop() for _ in range(chunks))
        self.handles[taken[0]] = taken
        return Code.CUDA_SUCCESS, taken[0]

    def cuMemRelease(self, handle: int) -> tuple[Code]:  # noqa: N802
        assert handle in self.handles, "released twice"
        assert handle not in self.mapped.values(), "released while it is mapped"
        if code := self._code("cuMemRelease"):
            return (code,)
        self._free += self.handles.pop(handle)
        return (code,)

    def cuMemMap(  # noqa: N802
        self, address: int, size: int, offset: int, handle: int, flags: int
    ) -> tuple[Code]:
        assert address % self.chunk_bytes == 0
        assert size == len(self.handles[handle]) * self.chunk_bytes
        assert any(
            at <= address and address + size <= at + length for at, length in self.reserved.items()
        )
        assert self._backed.isdisjoint(self._chunks(address, size)), "memory is there already"
        assert handle not in self.mapped.values(), "it is mapped elsewhere"
        if code := self._code("cuMemMap"):
            return (code,)
        at = address
        for first, end in runs(self.handles[handle]):
            length = (end - first) * self.chunk_bytes
            self._put(at, length, _MAP_SHARED, self._file, first * self.chunk_bytes)
            at += length
        self._backed.update(self._chunks(address, size))
        self.mapped[address] = handle
        return (code,)

    def cuMemSetAccess(  # noqa: N802
        self, address: int, size: int, access: list[Any], count: int
    ) -> tuple[Code]:
        chunks = self._chunks(address, size)
        assert self._backed.issuperset(chunks), "not all of it is mapped"
        assert access[0].flags == 3
        assert count == len(access) == 1
        if code := self._code("cuMemSetAccess"):
            return (code,)
        assert _libc.mprotect(address, size, _READ_WRITE) == 0
        self.allowed.update(chunks)
        return (code,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Code]:  # noqa: N802
        assert address in self.mapped, "unmapped twice"
        assert size == len(self.handles[self.mapped[address]]) * self.chunk_bytes
        if code := self._code("cuMemUnmap"):
            return (code,)
        del self.mapped[address]
        self._put(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        self._backed.difference_update(self._chunks(address, size))
        self.allowed.difference_update(self._chunks(address, size))
        return (code,)

    def cuMemHostRegister(  # noqa: N802
        self, address: int, size: int, flags: int
    ) -> tuple[Code]:
        assert flags == 0
        ends = {begin: begin + held for begin, held in self.pinned.items()}
        apart = all(address >= end or address + size <= begin for begin, end in ends.items())
        assert apart, "pinned twice"
        if code := self._code("cuMemHostRegister"):
            return (code,)
        self.pinned[address] = size
        return (code,)

    def _chunks(self, address: int, size: int) -> range:
        return range(address, address + size, self.chunk_bytes)

    def _put(self, address: int, size: int, flags: int, file: int, begin: int) -> None:
        found = _libc.mmap(address, size, _NONE, flags | _MAP_FIXED, file, begin)
        assert found == address, os.strerror(ctypes.get_errno())

    def _code(self, function: str) -> Code:
        return Code.CUDA_ERROR_UNKNOWN if self.fails(function) else Code.CUDA_SUCCESS
