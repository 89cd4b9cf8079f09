"""What of a file lies in the kernel's page cache, and bringing it there.

The cache is the machine's: what it holds is nobody's memory, goes when that is wanted, and on some
virtual machines when it was not read for a minute. Before: engines, for files that loads will map.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

READ_BYTES = 4 << 20
"""At once."""

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def cached_share(path: Path) -> float:
    """Of the file's pages, those that are in the cache. Where neither the file's owner nor one who
    may write to it asks, the kernel says that all are (mincore(2)). Raises OSError.
    """
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            return 1.0
        try:
            mapped = mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(errno.ESTALE, "it was cut off", str(path)) from error
        with mapped:
            pages = np.frombuffer(mapped, np.uint8)
            there = np.empty(-(-size_bytes // mmap.PAGESIZE), np.uint8)
            failed = _mincore(pages.ctypes.data, size_bytes, there.ctypes.data)
            del pages  # a mapping that is referred to cannot be closed
            if failed:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path))
            return float((there & 1).mean())


def read_through(path: Path, between: Callable[[], None] = lambda: None) -> None:
    """Have all of it in the cache, as far as there is room; `between` is called between any two
    reads. Raises OSError, and what that raises.
    """
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.readinto(buffer):
            between()
