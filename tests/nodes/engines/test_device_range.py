"""Memory comes under chunks and goes; whatever call fails, the books are the driver's."""

import ctypes
import random
from collections import Counter

import pytest

from mesh.domain.errors import EngineError, OutOfMemory
from mesh_nodes.engines.cuda_driver import CudaDriver, open_driver
from mesh_nodes.engines.device_range import DeviceRange, runs
from tests.support.cuda_driver import StandInDriver
from tests.support.depth import DEEP

CHUNKS, DEVICE_CHUNKS, RESIZES = 64, 48, 10_000 if DEEP else 2_000


def made(device: StandInDriver) -> DeviceRange:
    return DeviceRange(CudaDriver(device, 0), CHUNKS * device.chunk_bytes)


class Stamps:
    """The first and the last bytes of each chunk, by which it is known again."""

    def __init__(self, memory: DeviceRange) -> None:
        self._memory = memory

    def read(self, chunk: int) -> tuple[int, int]:
        return self._at(chunk, 0).value, self._at(chunk, self._memory.chunk_bytes - 8).value

    def write(self, chunk: int, stamp: int) -> None:
        self._at(chunk, 0).value = self._at(chunk, self._memory.chunk_bytes - 8).value = stamp

    def _at(self, chunk: int, offset: int) -> ctypes.c_uint64:
        address = self._memory.address + chunk * self._memory.chunk_bytes + offset
        return ctypes.c_uint64.from_address(address)


def attempt(
    memory: DeviceRange, chunks: set[int], spare_max: int = 0
) -> list[tuple[int, int]] | EngineError:
    try:
        return memory.hold(chunks, spare_max)
    except EngineError as error:
        return error


def check_books(memory: DeviceRange, device: StandInDriver, wanted: set[int]) -> None:
    at = {memory.address + chunk * memory.chunk_bytes for chunk in wanted}
    assert at <= device.allowed
    assert len(set(device.mapped.values())) == len(device.mapped), "one memory in two places"
    assert set(device.mapped.values()) <= device.handles.keys()
    assert memory.held_bytes == len(device.handles) * device.chunk_bytes


@pytest.mark.parametrize("seed", range(4))
def test_books_are_the_drivers_after_thousands_of_resizes_whatever_fails(seed: int) -> None:
    """What had memory before a failed grow keeps it and its content; a shrink never fails."""
    draw = random.Random(seed)
    failing = 0.0
    device = StandInDriver(DEVICE_CHUNKS, fails=lambda function: draw.random() < failing)
    memory = made(device)
    stamps, wanted, known, refused = Stamps(memory), set[int](), dict[int, int](), 0
    for resize in range(RESIZES // 4):
        failing = draw.choice((0.0, 0.0, 0.02, 0.3))
        shrinks = draw.random() < 0.5
        pool = sorted(wanted) if shrinks else range(CHUNKS)
        picked = set(draw.sample(pool, draw.randint(0, len(pool))))
        asked = picked if shrinks else wanted | picked
        spare_max = draw.choice((0, 3))
        fresh = attempt(memory, asked, spare_max)
        if isinstance(fresh, EngineError):
            assert not shrinks, fresh
            assert failing or isinstance(fresh, OutOfMemory)
            refused += 1
        else:
            come = {chunk for first, end in fresh for chunk in range(first, end)}
            assert come == asked - wanted
            wanted = asked
            for chunk in come:
                known[chunk] = resize
                stamps.write(chunk, resize)
        check_books(memory, device, wanted)
        if not failing:
            spare_bytes = memory.held_bytes - len(wanted) * device.chunk_bytes
            assert 0 <= spare_bytes <= spare_max * device.chunk_bytes, "what was kept goes now"
        assert all(stamps.read(chunk) == (known[chunk],) * 2 for chunk in wanted)
    assert RESIZES // 100 < refused < RESIZES // 4
    failing = 0.0
    memory.close()
    assert not device.handles
    assert not device.mapped
    assert not device.reserved


CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("nth", range(1, 7))
def test_any_one_failure_leaves_nothing_behind(function: str, nth: int) -> None:
    """Two grows in two runs each, and a shrink, with the n-th of these calls refused."""
    calls = 0

    def fails(asked: str) -> bool:
        nonlocal calls
        calls += asked == function
        return asked == function and calls == nth

    device = StandInDriver(DEVICE_CHUNKS, fails=fails)
    memory = made(device)
    wanted = set[int]()
    for asked in ({0, 1, 4}, {0, 1, 2, 4, 5, 6, 7}, {0, 4}):
        fresh = attempt(memory, asked)
        if isinstance(fresh, EngineError):
            assert function in fresh.message
        else:
            wanted = asked
        check_books(memory, device, wanted)
    device.fails = lambda function: False
    memory.close()
    assert (device.handles, device.mapped, device.reserved) == ({}, {}, {})


def test_spare_memory_is_taken_first_and_counts() -> None:
    device = StandInDriver(8)
    memory = made(device)
    memory.hold(range(6))
    memory.hold(range(2), spare_max=3)
    assert memory.held_bytes == 5 * device.chunk_bytes
    assert device.free_bytes == 3 * device.chunk_bytes
    assert memory.lacks_bytes(range(7)) == 2 * device.chunk_bytes
    device.fails = lambda function: function == "cuMemCreate"
    assert memory.hold(range(5)) == [(2, 5)]
    assert memory.lacks_bytes(range(5)) == 0


def test_a_device_that_is_full_refuses_and_keeps_what_it_had() -> None:
    device = StandInDriver(4)
    memory = made(device)
    memory.hold([0, 9])
    with pytest.raises(OutOfMemory, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.hold(range(10))
    assert memory.held_bytes == 2 * device.chunk_bytes
    check_books(memory, device, {0, 9})


def test_access_is_set_once_for_neighbours() -> None:
    asked = Counter[str]()

    def fails(function: str) -> bool:
        asked[function] += 1
        return False

    made(StandInDriver(8, fails=fails)).hold([0, 1, 2, 5])
    assert asked["cuMemSetAccess"] == 2
    assert asked["cuMemMap"] == 4


def test_what_cannot_be_given_back_is_told_when_it_is_closed() -> None:
    device = StandInDriver(4, fails=lambda function: function == "cuMemUnmap")
    memory = made(device)
    memory.hold([0])
    with pytest.raises(EngineError, match=f"took {device.chunk_bytes} bytes not back"):
        memory.close()


def test_a_device_without_virtual_memory_is_refused() -> None:
    with pytest.raises(EngineError, match="GPU 0 has no virtual memory"):
        CudaDriver(StandInDriver(1, manages=False), 0)


def test_without_a_driver_none_is_opened() -> None:
    assert open_driver(0) is None


def test_runs_are_neighbours_as_one() -> None:
    assert list(runs([])) == []
    assert list(runs([3])) == [(3, 4)]
    assert list(runs([1, 2, 3, 5, 8, 9])) == [(1, 4), (5, 6), (8, 10)]
