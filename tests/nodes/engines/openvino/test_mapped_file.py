"""A mapped file takes memory only for as long as somebody wants it to."""

import os
from pathlib import Path

import pytest

from mesh_nodes.engines.openvino.mapped_file import MappedFile, pages_released
from tests.support.waiting import until

SIZE_BYTES = 8 * 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "weights.bin"
    found.write_bytes(os.urandom(SIZE_BYTES))
    return found


def resident_bytes(path: Path) -> int:
    """The bytes that this process's maps of the file hold in memory."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    found, mine = 0, False
    for line in lines:
        word = line.split()[0]
        if not word.endswith(":"):
            mine = line.endswith(str(path))
        elif word == "Rss:" and mine:
            found += int(line.split()[1]) * 1024
    return found


def test_pages_that_are_read_within_the_block_go_while_it_lasts(path: Path) -> None:
    file = MappedFile(path)
    whole = file.bytes_at(0, SIZE_BYTES)
    assert resident_bytes(path) == SIZE_BYTES
    with pages_released([file]):
        until(lambda: resident_bytes(path) == 0)
        assert file.bytes_at(0, SIZE_BYTES) == whole, "they come back as they were"
        until(lambda: resident_bytes(path) == 0)
        file.bytes_at(0, SIZE_BYTES)
    assert resident_bytes(path) == 0, "none is left behind"


def test_the_release_ends_with_a_block_that_fails(path: Path) -> None:
    file = MappedFile(path)
    with pytest.raises(RuntimeError, match="amid"), pages_released([file]):
        raise RuntimeError("amid the first run")
    file.bytes_at(0, SIZE_BYTES)
    assert resident_bytes(path) == SIZE_BYTES
