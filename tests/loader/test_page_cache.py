"""Files in the kernel's page cache: how much of one is there, and having it there."""

import mmap
import threading
from pathlib import Path

import pytest

from mesh_loader import page_cache
from mesh_loader.page_cache import (
    AHEAD_BYTES,
    AHEAD_THREADS,
    READ_BYTES,
    cached_share,
    read_ahead,
    read_through,
)
from tests.support.page_cache import forget
from tests.support.waiting import until


def readers() -> int:
    return sum(thread.name == "mesh-pages-ahead" for thread in threading.enumerate())


def test_what_was_read_is_there_and_what_was_forgotten_is_not(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * READ_BYTES + 1))
    forget(path)
    assert cached_share(path) == 0.0
    reads: list[float] = []
    read_through(path, lambda: reads.append(cached_share(path)))
    assert len(reads) == 3
    assert 0.0 < reads[0] <= reads[1] <= reads[2] == 1.0


def test_an_empty_file_is_there_and_one_that_is_gone_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "nothing"
    path.touch()
    assert cached_share(path) == 1.0
    path.unlink()
    with pytest.raises(FileNotFoundError):
        cached_share(path)
    with pytest.raises(FileNotFoundError):
        read_through(path)
    read_ahead(path)()  # whoever wants the file will say so


def test_reading_ahead_brings_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(AHEAD_THREADS * AHEAD_BYTES + 1))
    forget(path)
    read_ahead(path)
    until(lambda: not readers())
    assert cached_share(path) == 1.0


def test_reading_ahead_begins_nothing_where_all_is_there_or_no_thread_is_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    class NoThread(threading.Thread):
        def start(self) -> None:
            begun.append(self.name)
            raise RuntimeError("can't start new thread")

    path = tmp_path / "weights"
    path.write_bytes(bytes(AHEAD_BYTES))
    monkeypatch.setattr(threading, "Thread", NoThread)
    read_ahead(path)()
    assert not begun
    forget(path)
    read_ahead(path)()
    assert begun == ["mesh-pages-ahead"]


def test_reading_ahead_ends_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "AHEAD_BYTES", mmap.PAGESIZE)
    path = tmp_path / "weights"
    path.write_bytes(bytes(128 * AHEAD_BYTES))
    forget(path)
    read_ahead(path)()
    until(lambda: not readers())
    assert cached_share(path) < 1.0
