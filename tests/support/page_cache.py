"""Files that the kernel is made to forget."""

from pathlib import Path

import pytest

from mesh_loader import page_cache


def forget(path: Path) -> None:
    """Skips the test where the file system has nothing but the page cache."""
    page_cache.forget(path)
    if path.stat().st_size and page_cache.cached_share(path) == 1.0:
        pytest.skip(f"{path.parent} lies in memory")
