"""What stands in the pool is found once it is whole, stays while held, and goes by its age."""

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mesh_nodes.engines.vllm.host_pool import CHUNK_BYTES, HostPool, WeightsKey, open_pool
from mesh_nodes.engines.vllm.messages import WHOLE, Layout, Range
from mesh_nodes.engines.vllm.sleeping import SleepingProcesses
from tests.contract.engine_contract import StoredModel

CHUNKS = 10


@dataclass(slots=True, eq=False)
class Process:
    """It is whatever the test says."""

    alive: bool = True

    @property
    def gone(self) -> bool:
        return not self.alive


class Keys:
    """Weights by a letter, so many chunks each."""

    def __init__(self, model: StoredModel, pool: HostPool) -> None:
        self._model, self.pool = model, pool

    def key(self, name: str) -> WeightsKey:
        return WeightsKey(model=self._model.info, model_path=Path(name), dtype="float32")

    def take(self, name: str, chunks: int = 1) -> tuple[Range | None, Process]:
        process = Process()
        return self.pool.take(self.key(name), process, layout(chunks)), process

    def left(self, name: str, chunks: int = 1) -> Range:
        """By a process that has filled it and ended."""
        where, process = self.take(name, chunks)
        assert where is not None
        content = name.encode() * (where.size_bytes - len(WHOLE))
        os.pwrite(self.pool.descriptor, content, where.offset)
        mark_whole(self.pool, where)
        process.alive = False
        return where

    def names(self) -> str:
        return "".join(str(key.model_path) for key in self.pool.listed())

    def content(self, where: Range) -> bytes:
        return os.pread(self.pool.descriptor, 8, where.offset)


def mark_whole(pool: HostPool, where: Range) -> None:
    os.pwrite(pool.descriptor, WHOLE, where.offset + where.size_bytes - len(WHOLE))


def layout(chunks: int) -> Layout:
    sizes_bytes = (CHUNK_BYTES // 2,) * (2 * chunks - 1) + (1,)
    return Layout(tensors=(), sizes_bytes=sizes_bytes, beside=())


def file_bytes(pool: HostPool) -> int:
    return 512 * os.fstat(pool.descriptor).st_blocks


@pytest.fixture
def keys(model: StoredModel) -> Iterator[Keys]:
    pool = HostPool(bytes_max=CHUNKS * CHUNK_BYTES, available_bytes=lambda: 1 << 50)
    yield Keys(model, pool)
    pool.close()


def test_half_a_range_is_nothing(keys: Keys) -> None:
    where, process = keys.take("a")
    assert where is not None
    assert not where.whole
    os.pwrite(keys.pool.descriptor, b"half", where.offset)
    assert keys.names() == ""
    assert keys.take("a")[0] is None, "somebody fills it"
    assert keys.pool.hold(keys.key("a"), Process()) is None
    process.alive = False
    assert keys.names() == ""
    assert (keys.pool.used_bytes, file_bytes(keys.pool)) == (0, 0)
    again, _ = keys.take("a")
    assert again is not None
    assert not again.whole


def test_what_is_whole_outlives_who_filled_it(keys: Keys) -> None:
    where = keys.left("a")
    assert keys.names() == "a"
    process = Process()
    held = keys.pool.hold(keys.key("a"), process)
    assert held == replace(where, whole=True)
    assert keys.content(where) == b"a" * 8
    assert keys.take("a")[0] == held, "nobody fills it twice"
    assert keys.pool.used_bytes == CHUNK_BYTES


def test_the_one_used_the_longest_ago_goes_first_and_what_is_held_never(keys: Keys) -> None:
    ranges = {name: keys.left(name, chunks) for name, chunks in (("a", 3), ("b", 3), ("c", 3))}
    keys.pool.touch(keys.key("a"))
    holder = Process()
    assert keys.pool.hold(keys.key("b"), holder)
    assert keys.names() == "cab"
    keys.left("d", 4)
    assert keys.names() == "abd"
    assert keys.content(ranges["c"]) == bytes(8), "its memory is the system's again"
    assert keys.take("e", 8)[0] is None
    assert keys.names() == "abd", "nothing goes in vain"
    assert keys.take("f", 7)[0] is not None
    assert keys.names() == "b"
    assert keys.content(ranges["b"]) == b"b" * 8
    holder.alive = False
    keys.left("g", 3)
    assert keys.names() == "g"


def test_nothing_goes_where_the_host_has_too_little_whatever_goes(model: StoredModel) -> None:
    pool = HostPool(
        bytes_max=1 << 50,
        available_bytes=lambda: 4 * CHUNK_BYTES - sum(file_bytes(pool) for pool in made),
    )
    made, keys = [pool], Keys(model, pool)
    keys.left("a", 2)
    keys.left("b", 2)
    assert keys.take("c", 5)[0] is None
    assert keys.names() == "ab"
    assert keys.take("c", 2)[0] is not None
    assert keys.names() == "b"
    pool.close()


def test_what_is_promised_and_not_filled_yet_is_nobody_elses(model: StoredModel) -> None:
    """A host of 6 chunks, whose memory is taken by what is written alone."""
    pool = HostPool(
        bytes_max=CHUNKS * CHUNK_BYTES,
        available_bytes=lambda: 6 * CHUNK_BYTES - sum(file_bytes(pool) for pool in made),
    )
    made, keys = [pool], Keys(model, pool)
    where, filling = keys.take("a", 4)
    assert where is not None
    assert keys.take("b", 3)[0] is None
    assert not pool.fits(keys.key("b"), layout(3), 0, but=[])
    assert pool.fits(keys.key("b"), layout(3), 0, but=[filling])
    for share in (1, 2, 4):
        os.pwrite(pool.descriptor, bytes(share * CHUNK_BYTES), where.offset)
        assert keys.take("b", 3)[0] is None, "what is written of it counts once"
        assert pool.fits(keys.key("b"), layout(2), 0, but=[])
    mark_whole(pool, where)
    assert keys.take("b", 3)[0] is None
    taken, failed = keys.take("b", 2)
    assert taken is not None
    assert keys.take("c")[0] is None
    failed.alive = False
    assert keys.take("c")[0] is not None, "nobody fills it any more"
    pool.close()


def test_what_processes_have_for_themselves_counts_while_they_live(keys: Keys) -> None:
    keys.left("a", 4)
    first, second = Process(), Process()
    for process in (first, second):
        assert keys.pool.hold(keys.key("a"), process, beside_bytes=2 * CHUNK_BYTES)
    assert keys.pool.used_bytes == 8 * CHUNK_BYTES
    assert keys.pool.held_bytes(but=[first]) == 6 * CHUNK_BYTES
    assert keys.pool.held_bytes(but=[first, second]) == 0
    assert keys.take("b", 3)[0] is None
    wanted = keys.key("b"), layout(4), 0
    assert keys.pool.fits(*wanted, but=[first])
    assert not keys.pool.fits(keys.key("b"), layout(5), 0, but=[first])
    assert not keys.pool.fits(*wanted, but=[])
    first.alive = False
    assert keys.take("b", 4)[0] is not None


def test_what_is_refused_is_for_those_who_sleep_alone(keys: Keys) -> None:
    where = keys.left("a")
    holder = Process()
    assert keys.pool.hold(keys.key("a"), holder)
    keys.pool.refuse(keys.key("a"))
    assert keys.names() == ""
    held, other = keys.take("a")
    assert held == replace(where, whole=True)
    holder.alive = False
    assert keys.pool.used_bytes == CHUNK_BYTES, "the other's"
    other.alive = False
    assert keys.pool.used_bytes == 0
    keys.left("a")
    assert keys.names() == ""


def test_books_and_memory_agree_in_random_walks(keys: Keys) -> None:
    """No two ranges overlap, the bound holds, and what is listed has its content."""
    draw = random.Random(5)
    living: list[Process] = []
    ranges: dict[str, tuple[Range, Process]] = {}
    """The last that was given to be filled, and to whom."""
    end = 0
    for _ in range(600):
        name = draw.choice("abcdefgh")
        match draw.randrange(4):
            case 0:
                where, process = keys.take(name, draw.randint(1, 5))
                living.append(process)
                if where is not None and not where.whole:
                    assert where.offset >= end
                    end = where.offset + where.size_bytes
                    os.pwrite(keys.pool.descriptor, name.encode() * 8, where.offset)
                    ranges[name] = where, process
            case 1:
                if name in ranges and ranges[name][1].alive:
                    mark_whole(keys.pool, ranges[name][0])
            case 2:
                if living:
                    living.pop(draw.randrange(len(living))).alive = False
            case _:
                process = Process()
                if keys.pool.hold(keys.key(name), process):
                    living.append(process)
        used_bytes = keys.pool.used_bytes
        assert file_bytes(keys.pool) <= used_bytes <= CHUNKS * CHUNK_BYTES
        for found in keys.names():
            assert keys.content(ranges[found][0]) == found.encode() * 8
    for process in living:
        process.alive = False
    assert keys.pool.held_bytes() == 0


def test_a_closed_pool_takes_nothing(keys: Keys) -> None:
    keys.left("a")
    keys.pool.close()
    keys.pool.close()
    assert keys.names() == ""
    assert keys.take("a")[0] is None


def test_where_the_system_has_no_such_file_nothing_sleeps_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(name: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refused)
    pool = open_pool(1 << 30, lambda: 1 << 50)
    assert pool is None
    assert "all loads are from disk: [Errno 38] Function not implemented" in caplog.text
    assert SleepingProcesses(count_max=2, pool=pool).count_max == 0
