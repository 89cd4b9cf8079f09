"""Files in and out of the page cache, and how fast bytes come from the disk and through memory."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from bench.cold_start.starts import Rates
from bench.reading.readers import DIRECT_THREADS, direct, drop_cached, memcpy_s
from mesh.domain.errors import StorageError

TRIES = 3
COPIED_BYTES_MAX = 1 << 30
_PIECE_BYTES = 8 << 20
_LOOKS = 64
_CACHED_SHARE_MAX = 0.1


def bring(*paths: Path) -> None:
    """Read these files, and all files in these folders, so that the page cache has them."""
    for path in _files(paths):
        with path.open("rb", buffering=0) as file:
            while file.read(_PIECE_BYTES):
                pass


def forget(*paths: Path) -> None:
    """Have the page cache forget them. Raises StorageError where it keeps a large one."""
    for path in _files(paths):
        drop_cached(path)
        share = cached_share(path) if path.stat().st_size > _PIECE_BYTES else 0.0
        if share > _CACHED_SHARE_MAX:
            raise StorageError(
                f"the page cache keeps {share:.0%} of {path.name} when it is to forget it",
                hint="somebody has it mapped, or its file system is in memory",
            )


def _files(paths: Sequence[Path]) -> list[Path]:
    found = [each for path in paths for each in (path, *path.rglob("*"))]
    return [path for path in found if path.is_file()]


def cached_share(path: Path) -> float:
    """Of a file: how many of some pages, evenly spread, can be read without waiting."""
    size_bytes = path.stat().st_size
    descriptor, cached = os.open(path, os.O_RDONLY), 0
    try:
        # What is read ahead by one look is not what another finds.
        for number in range(_LOOKS):
            try:
                os.preadv(descriptor, [bytearray(1)], number * size_bytes // _LOOKS, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            cached += 1
    finally:
        os.close(descriptor)
    return cached / _LOOKS


def rates(weights: Path) -> Rates:
    """The best that the disk gives of this file past the page cache, and a copy of as many bytes
    into memory that is there."""
    size_bytes = weights.stat().st_size
    copied_bytes = min(size_bytes, COPIED_BYTES_MAX)
    return Rates(
        memcpy=copied_bytes / memcpy_s(copied_bytes, TRIES),
        disk=max(
            _direct_rate(weights, threads) for threads in DIRECT_THREADS for _ in range(TRIES)
        ),
    )


def _direct_rate(path: Path, threads: int) -> float:
    start_s = time.perf_counter()
    read_bytes = direct(path, threads)
    return read_bytes / (time.perf_counter() - start_s)
