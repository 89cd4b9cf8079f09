"""Files that the kernel is made to forget."""

import os
from pathlib import Path

import pytest

from mesh_loader.page_cache import cached_share


def forget(path: Path) -> None:
    """Out of the page cache; skips the test where the file system has nothing but that."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if path.stat().st_size and cached_share(path) == 1.0:
        pytest.skip(f"{path.parent} lies in memory")
