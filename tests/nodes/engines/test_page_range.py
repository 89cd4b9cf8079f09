"""A range costs addresses alone until it is written to, and pages go back as they came."""

from pathlib import Path

import numpy as np
import pytest

from mesh.domain.errors import OutOfMemory
from mesh_nodes.engines.page_range import PAGE_BYTES, PageRange
from tests.nodes.engines.openvino.residency import mapped_bytes, resident_bytes

MIB = 2**20
BYTES = np.dtype(np.uint8)


def test_reserving_takes_no_memory_and_writing_takes_what_is_written() -> None:
    before, mapped = resident_bytes(), mapped_bytes()
    held = PageRange(4096 * MIB)
    assert mapped_bytes() - mapped >= 4096 * MIB
    assert resident_bytes() - before < MIB
    held.array(BYTES, (64 * MIB,), 1000 * MIB)[:] = 1
    assert 63 * MIB < resident_bytes() - before < 66 * MIB


def test_what_is_given_back_leaves_the_process_and_reads_as_zeros() -> None:
    held = PageRange(64 * MIB)
    array = held.array(BYTES, (64 * MIB,), 0)
    array[:] = 1
    before = resident_bytes()
    held.free_pages(16 * MIB, 48 * MIB)
    assert 31 * MIB < before - resident_bytes() < 33 * MIB
    assert array[: 16 * MIB].all()
    assert not array[16 * MIB : 48 * MIB].any()
    assert array[48 * MIB :].all()


def test_only_whole_pages_go() -> None:
    array = (held := PageRange(8 * PAGE_BYTES)).array(BYTES, (8 * PAGE_BYTES,), 0)
    array[:] = 1
    held.free_pages(PAGE_BYTES + 1, 4 * PAGE_BYTES - 1)
    assert array.reshape(8, PAGE_BYTES).any(axis=1).tolist() == [True, True, False, *[True] * 5]
    held.free_pages(5 * PAGE_BYTES + 1, 6 * PAGE_BYTES - 1)
    assert array[5 * PAGE_BYTES :].all(), "not one whole page"


def test_views_lie_where_they_are_asked_for() -> None:
    held = PageRange(2 * PAGE_BYTES)
    held.array(np.dtype(np.float16), (3, 4), 64)[:] = 7
    whole = held.array(BYTES, (2 * PAGE_BYTES,), 0)
    assert np.flatnonzero(whole).min() >= 64
    assert np.flatnonzero(whole).max() < 64 + 3 * 4 * 2


def test_a_closed_range_holds_nothing_and_is_unmapped_with_its_last_array() -> None:
    mapped, before = mapped_bytes(), resident_bytes()
    held = PageRange(256 * MIB)
    array = held.array(BYTES, (256 * MIB,), 0)
    array[: 64 * MIB] = 1
    held.close()
    assert resident_bytes() - before < MIB
    assert mapped_bytes() - mapped > 255 * MIB
    del array
    assert mapped_bytes() - mapped < MIB


def test_addresses_that_cannot_be_had_are_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match=r"range of .* cannot be reserved") as refused:
        PageRange(2**60)
    assert refused.value.hint


def test_a_mapped_file_is_read_and_never_written(tmp_path: Path) -> None:
    """Its pages come back when they are given back; the rest of its last page is zeros."""
    file = tmp_path / "f"
    file.write_bytes(b"a" * PAGE_BYTES + b"b" * 10)
    held = PageRange(4 * PAGE_BYTES)
    array = held.array(BYTES, (4 * PAGE_BYTES,), 0)
    with file.open("rb") as opened:
        held.map_file(opened.fileno(), 0, PAGE_BYTES + 10, PAGE_BYTES)
        with pytest.raises(ValueError, match="beyond a range"):
            held.map_file(opened.fileno(), 0, PAGE_BYTES, 4 * PAGE_BYTES)
        with pytest.raises(OSError, match="not mapped"):
            held.map_file(opened.fileno(), 1, PAGE_BYTES, 0)
    content = [0, ord("a"), ord("b"), 0]
    places = [PAGE_BYTES - 1, PAGE_BYTES, 2 * PAGE_BYTES + 9, 2 * PAGE_BYTES + 10]
    assert array[places].tolist() == content
    array[PAGE_BYTES] = 7
    held.free_pages(PAGE_BYTES, 3 * PAGE_BYTES)
    assert array[places].tolist() == content
    assert file.read_bytes()[:1] == b"a"
