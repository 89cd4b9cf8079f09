"""Pages go back for free blocks alone, in slices, off the caller's thread, and never too late."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh_nodes.engines.openvino.blocks import BlockPlaces, Blocks
from mesh_nodes.engines.openvino.held_blocks import HeldBlocks
from tests.nodes.engines.openvino.pools import NoPages
from tests.support.waiting import until

BLOCKS = 64


class Pages:
    """Stands in for the memory: says what was given back, and can be made to take its time."""

    def __init__(self, shared_blocks: int = 0) -> None:
        self.given: list[tuple[int, int]] = []
        self.contents: dict[int, object] = {}
        self.enter, self.leave = threading.Event(), threading.Event()
        self.leave.set()
        self.fails = False
        self.held = HeldBlocks(
            BLOCKS, slice_blocks=8, shared_blocks=shared_blocks, free_pages=self.free_pages
        )

    def free_pages(self, first: int, end: int) -> None:
        self.enter.set()
        assert self.leave.wait(10)
        if self.fails:
            raise OSError(22, "locked")
        self.given.append((first, end))
        for block in range(first, end):
            self.contents.pop(block, None)


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.leave.set()
    pages.held.close()


def numbers(*blocks: int) -> Blocks:
    return np.array(blocks, np.int64)


def test_a_trim_gives_back_the_highest_free_blocks_in_slices(pages: Pages) -> None:
    pages.held.hold(np.arange(30))
    pages.held.trim(numbers(1, 29), keep=10)
    until(lambda: pages.held.count == 10)
    assert pages.given == [(21, 29), (13, 21), (9, 13)]
    pages.held.trim(numbers(1, 29), keep=10)
    assert pages.held.count == 10


def test_what_is_in_use_stays_however_little_may(pages: Pages) -> None:
    pages.held.hold(np.arange(6))
    pages.held.trim(numbers(0, 2, 5), keep=0)
    until(lambda: pages.held.count == 3)
    assert pages.given == [(3, 5), (1, 2)] or pages.given == [(1, 2), (3, 5)]


def test_blocks_that_hold_pages_are_chosen_first(pages: Pages) -> None:
    pages.held.hold(numbers(3, 7, 9))
    assert pages.held.claim(np.arange(12), 2).tolist() == [3, 7]
    assert pages.held.claim(numbers(0, 1, 2, 9, 10), 3).tolist() == [9, 0, 1]
    assert pages.held.count == 5


def test_a_call_does_not_wait_for_the_pages_to_go(pages: Pages) -> None:
    pages.leave.clear()
    pages.held.hold(np.arange(32))
    pages.held.trim(numbers(), keep=0)
    assert pages.enter.wait(10)
    pages.held.trim(numbers(), keep=0)
    assert pages.held.claim(np.arange(16), 4).tolist() == [0, 1, 2, 3]
    assert pages.held.count == 32, "held until they are gone"
    pages.leave.set()
    until(lambda: pages.held.count == 4)
    assert min(first for first, _ in pages.given) == 4


def test_a_block_whose_pages_are_going_can_be_had_after_that(pages: Pages) -> None:
    pages.leave.clear()
    pages.held.hold(np.arange(8))
    pages.held.trim(numbers(), keep=0)
    assert pages.enter.wait(10)
    claimed = threading.Event()

    def claim() -> None:
        pages.held.claim(numbers(3), 1)
        claimed.set()

    thread = threading.Thread(target=claim)
    thread.start()
    assert not claimed.wait(0.05)
    pages.leave.set()
    assert claimed.wait(10)
    thread.join()
    assert pages.given == [(0, 8)]
    assert pages.held.count == 1, "held anew"


def test_a_trim_that_may_wait_does_until_one_may_not(pages: Pages) -> None:
    pages.held.hold(np.arange(8))
    pages.held.trim(numbers(), keep=0, after_s=60.0)
    time.sleep(0.02)
    assert pages.held.count == 8
    pages.held.trim(numbers(), keep=4)
    until(lambda: pages.held.count == 0)


def test_who_comes_before_the_rest_is_over_keeps_the_pages_for_all_who_follow(pages: Pages) -> None:
    pages.held.hold(np.arange(8))
    pages.held.trim(numbers(), keep=0, after_s=0.2)
    assert list(pages.held.claim(np.arange(BLOCKS), 1)) == [0]
    time.sleep(0.3)
    assert pages.held.count == 8
    assert list(pages.held.claim(np.arange(1, BLOCKS), 7)) == list(range(1, 8))
    assert pages.given == []


def test_pages_that_the_system_keeps_stay_held_and_can_be_given_back_later(
    pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    pages.fails = True
    pages.held.hold(np.arange(4))
    pages.held.trim(numbers(), keep=0)
    until(lambda: "stay held" in caplog.text)
    pages.held.claim(np.arange(8), 2)
    assert pages.held.count == 4
    pages.fails = False
    pages.held.trim(numbers(0, 1), keep=0)
    until(lambda: pages.held.count == 2)


def test_nothing_is_given_back_after_a_close(pages: Pages) -> None:
    pages.held.hold(np.arange(8))
    pages.held.trim(numbers(), keep=0, after_s=0.05)
    pages.held.close()
    assert pages.held.count == 0
    time.sleep(0.1)
    assert pages.given == []


@pytest.mark.parametrize(
    ("in_use", "expected"),
    [((0, 12), (1, 12)), ((12,), (0, 12)), ((0, 9, 12), (10, 12)), ((0,), (1, BLOCKS))],
)
def test_shared_pages_go_with_the_last(in_use: tuple[int, ...], expected: tuple[int, int]) -> None:
    """A page reaches over 100 blocks here: neighbours that hold nothing go along, others do not."""
    pages = Pages(shared_blocks=100)
    pages.held.hold(numbers(10, *in_use))
    pages.held.trim(numbers(*in_use), keep=0)
    until(lambda: pages.held.count == len(in_use))
    pages.held.close()
    assert pages.given == [expected]


class Claimed(NoPages):
    """Blocks as the cache chooses them, where the test says when pages are trimmed."""

    def __init__(self, held: HeldBlocks) -> None:
        self.claim = held.claim  # type: ignore[method-assign]


HISTORY = st.lists(
    st.tuples(st.sampled_from(["take", "give", "shrink", "rest"]), st.integers(0, 40)), max_size=50
)


@given(history=HISTORY, shared_blocks=st.sampled_from([0, 1, 3]))
def test_no_history_takes_pages_in_use(history: list[tuple[str, int]], shared_blocks: int) -> None:
    """With the pool that decides what is in use; and no more is held than may be taken."""
    pages = Pages(shared_blocks)
    places = BlockPlaces(Claimed(pages.held), blocks=40, total=BLOCKS)
    pool = KvBlocks(40, places, CacheBudget())
    in_use: dict[int, int] = {}
    for serial, (action, number) in enumerate(history):
        if action == "take" and number <= pool.free:
            in_use |= (written := dict.fromkeys(pool.take(number), serial))
            pages.contents |= written
        elif action == "give":
            freed = sorted(in_use)[::2][:number]
            pool.release(freed)
            in_use = {block: value for block, value in in_use.items() if block not in freed}
        elif action == "shrink" and number >= max(pool.used, 1):
            pool.resize(number)
            pages.held.trim(places.taken(), keep=number)
        elif action == "rest":
            pages.held.trim(places.taken(), keep=0)
        assert pages.held.count >= pool.used
        assert {block: pages.contents.get(block) for block in in_use} == in_use
    pages.held.trim(places.taken(), keep=pool.blocks)
    until(lambda: pages.held.count <= pool.blocks)
    pages.held.trim(places.taken(), keep=0)
    until(lambda: pages.held.count == pool.used)
    assert {block: pages.contents.get(block) for block in in_use} == in_use
    pages.held.close()
