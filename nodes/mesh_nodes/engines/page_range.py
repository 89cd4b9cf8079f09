"""A range of addresses with memory of its own: pages come under it as it is written to.

The KV caches lie in such ranges. Reserving one takes no memory, and giving pages back copies
nothing; what is read there later is zeros, or the file's content where one was mapped. A KV cache
holds one large range for as long as its instance lives, or a new one for each size; `shape_blob`
has one of files alone.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import OutOfMemory
from mesh.domain.units import format_bytes

PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000
"""Linux: the range counts against no commit limit; the mmap module has no name for it."""
_MAP_FIXED = 0x10
"""Linux: at this address, whatever was mapped there."""
# Unlike mmap.madvise, a foreign call lets other threads have the interpreter meanwhile.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p


class PageRange:
    """Private to this process. It is unmapped once the last array over it is gone."""

    def __init__(self, size_bytes: int) -> None:
        """Whole pages. Raises OutOfMemory when so many addresses cannot be had."""
        size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, size_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(
                f"a range of {format_bytes(size_bytes)} cannot be reserved: "
                f"{getattr(error, 'strerror', None) or error}",
                hint="lower the context limit or the batch, or raise the address space limit",
            ) from error
        self._bytes = np.frombuffer(memory, np.uint8)

    def array(
        self, element: np.dtype[Any], shape: Sequence[int], begin_bytes: int
    ) -> npt.NDArray[Any]:
        """A view of the range from `begin_bytes` on."""
        end_bytes = begin_bytes + int(np.prod(shape, dtype=np.int64)) * element.itemsize
        return self._bytes[begin_bytes:end_bytes].view(element).reshape(shape)

    def map_file(self, descriptor: int, file_begin: int, size_bytes: int, begin_bytes: int) -> None:
        """Put so many bytes of a file there, copy-on-write; both begin with a page. The rest of the
        last page is zeros. Raises OSError, and ValueError beyond the range.
        """
        if begin_bytes + size_bytes > self._bytes.size:
            raise ValueError(
                f"{size_bytes} bytes at {begin_bytes} are beyond a range of {self._bytes.size}"
            )
        place, access = self._bytes.ctypes.data + begin_bytes, mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        if _mmap(place, size_bytes, access, flags, descriptor, file_begin) != place:
            number = ctypes.get_errno()
            raise OSError(number, f"a file is not mapped: {os.strerror(number)}")

    def free_pages(self, begin_bytes: int, end_bytes: int) -> None:
        """Give the whole pages between the two back to the system; both may lie amid a page.

        Raises OSError when the system refuses, as it does for pages that are locked in memory.
        """
        begin = -(-begin_bytes // PAGE_BYTES) * PAGE_BYTES
        end = end_bytes // PAGE_BYTES * PAGE_BYTES
        if begin >= end:
            return
        if _madvise(self._bytes.ctypes.data + begin, end - begin, mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, f"pages are not given back: {os.strerror(number)}")

    def close(self) -> None:
        """Give every page back, whoever still holds an array, and keep none to it."""
        self.free_pages(0, self._bytes.size)
        self._bytes = self._bytes[:0].copy()
