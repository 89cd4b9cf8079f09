"""Files in and out of the page cache, and how fast bytes come from the disk and through memory."""

import time
from collections.abc import Sequence
from pathlib import Path

from bench.cold_start.starts import Rates
from bench.reading.readers import DIRECT_THREADS, direct, memcpy_s
from mesh.domain.errors import StorageError
from mesh_loader import page_cache

TRIES = 3
COPIED_BYTES_MAX = 1 << 30
_PIECE_BYTES = 8 << 20
_CACHED_SHARE_MAX = 0.1


def bring(*paths: Path) -> None:
    """Read these files, and all files in these folders, so that the page cache has them."""
    for path in _files(paths):
        page_cache.read_through(path)


def forget(*paths: Path) -> None:
    """Have the page cache forget them. Raises StorageError where it keeps a large one."""
    for path in _files(paths):
        page_cache.forget(path)
        share = page_cache.cached_share(path) if path.stat().st_size > _PIECE_BYTES else 0.0
        if share > _CACHED_SHARE_MAX:
            raise StorageError(
                f"the page cache keeps {share:.0%} of {path.name} when it is to forget it",
                hint="somebody has it mapped, or its file system is in memory",
            )


def _files(paths: Sequence[Path]) -> list[Path]:
    found = [each for path in paths for each in (path, *path.rglob("*"))]
    return [path for path in found if path.is_file()]


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
