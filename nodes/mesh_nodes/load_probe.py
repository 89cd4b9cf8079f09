"""What loads from this node's disk should take, measured before there has been any.

Weights pass from the disk into memory that was not there before, one after the other; the fixed
part is the engine's own, which measures it. All of it within a second or so, on an idle machine.
Before: the composition root, where `kept_loads` knows nothing. After: the node's hello.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from mesh.domain.steps import LoadRate

READ_BYTES_MAX = 64 << 20
READ_S_MAX = 0.3
CHUNK_BYTES = 4 << 20
WRITTEN_BYTES = 8 << 20
"""Where the store has no file to read."""
COPIED_BYTES = 32 << 20
FILES_MAX = 64
"""At most so many files of the store are looked at."""
_PIECE_BYTES = 64 << 10
"""Larger buffers on the heap would change what the allocator gives back later."""


def measured_rate(store_path: Path, least_load_s: Callable[[], float]) -> LoadRate:
    """`least_load_s` measures what a load takes without any bytes. Raises OSError where the disk
    cannot be read, and what `least_load_s` does.
    """
    disk, memory = _read_bytes_per_s(store_path), _copy_bytes_per_s()
    return LoadRate(fixed_s=least_load_s(), bytes_per_s=1.0 / (1.0 / disk + 1.0 / memory))


def _read_bytes_per_s(store_path: Path) -> float:
    """The rate of reading the largest file of weights, or one that is written for it, past the page
    cache.
    """
    files = islice(store_path.glob("models/*/*.safetensors"), FILES_MAX)
    found = max(files, key=lambda path: path.stat().st_size, default=None)
    if found is not None and found.stat().st_size >= WRITTEN_BYTES:
        return _direct_bytes_per_s(found)
    with tempfile.NamedTemporaryFile(dir=store_path) as file:
        for _ in range(WRITTEN_BYTES // _PIECE_BYTES):
            file.write(os.urandom(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return _direct_bytes_per_s(Path(file.name))


def _direct_bytes_per_s(path: Path) -> float:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a filesystem in memory has no such thing
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(-1, CHUNK_BYTES) as chunk:
            _touch(chunk)
            done, start_s = 0, time.perf_counter()
            while done < READ_BYTES_MAX and time.perf_counter() - start_s < READ_S_MAX:
                count = os.preadv(descriptor, [chunk], done)
                done += count
                if count < CHUNK_BYTES:
                    break
            return max(done, 1) / max(time.perf_counter() - start_s, 1e-6)
    finally:
        os.close(descriptor)


def _copy_bytes_per_s() -> float:
    """Into fresh pages, which the system has to clear first."""
    with mmap.mmap(-1, COPIED_BYTES) as source, mmap.mmap(-1, COPIED_BYTES) as copy:
        _touch(source)
        with memoryview(source) as read, memoryview(copy) as written:
            start_s = time.perf_counter()
            written[:] = read
            return COPIED_BYTES / max(time.perf_counter() - start_s, 1e-6)


def _touch(pages: mmap.mmap) -> None:
    """Writes to the pages, so that they are in memory."""
    for _ in range(len(pages) // _PIECE_BYTES):
        pages.write(b"\1" * _PIECE_BYTES)
