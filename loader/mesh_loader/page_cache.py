"""What of a file lies in the kernel's page cache, bringing it there, and having it go.

The cache is the machine's: what it holds is nobody's memory, goes when that is wanted, and on some
virtual machines when it was not read for a minute. Before: engines, for files that loads will map.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

READ_BYTES = 4 << 20
"""At once."""
AHEAD_BYTES = 1 << 20
"""At once, by each of those that read ahead: what is wanted first has to be there first."""
AHEAD_THREADS = 2
"""A load of 135 MB from the disk takes 0.28 s with two, 0.3 with one, 0.37 with none, whose page
faults wait for one read after the other; four take from the load what it computes with."""
ALL_SHARE = 0.9
"""A file of which this share is in the cache needs no reading ahead."""

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def cached_share(path: Path) -> float:
    """The share of the file's pages that are in the cache. Where neither the file's owner nor one
    who may write to it asks, the kernel says that all are (mincore(2)). Raises OSError.
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


def forget(path: Path) -> None:
    """Have the cache forget it, as far as nobody has it mapped. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is still to be written would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ahead(path: Path) -> Callable[[], None]:
    """Begin to bring it there, beside who has mapped it and waits for its pages; nothing where it
    is there already, or where it cannot be done: a load only takes longer then, or says itself what
    is wrong with the file. Returns what ends it before the file's end.
    """
    over = threading.Event()
    with suppress(OSError, RuntimeError):  # the latter: no thread is to be had
        if cached_share(path) < ALL_SHARE:
            for number in range(AHEAD_THREADS):
                threading.Thread(
                    target=_read_every,
                    args=(path, number, over),
                    name="mesh-pages-ahead",
                    daemon=True,
                ).start()
    return over.set


def _read_every(path: Path, number: int, over: threading.Event) -> None:
    """The parts of the file from this one on that are this thread's."""
    buffer, begin = bytearray(AHEAD_BYTES), number * AHEAD_BYTES
    with suppress(OSError), path.open("rb", buffering=0) as file:
        while not over.is_set() and os.preadv(file.fileno(), [buffer], begin):
            begin += AHEAD_THREADS * AHEAD_BYTES
