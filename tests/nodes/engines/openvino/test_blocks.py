"""The block pool gives no block twice, gives low ones first, and shrinks without losing one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_nodes.engines.openvino.blocks import BlockPool

RANGE_BLOCKS = 40
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "give", "resize"]), st.integers(0, 40)), max_size=60
)


@given(blocks=st.integers(1, 40), actions=ACTIONS)
def test_holders_keep_their_blocks_through_any_history(
    blocks: int, actions: list[tuple[str, int]]
) -> None:
    """Each holder's contents follow the moves: after any history all of them are still there."""
    pool, held = BlockPool(blocks, range_blocks=RANGE_BLOCKS), dict[int, int]()
    contents: dict[int, int] = {}
    for holder, (action, number) in enumerate(actions):
        if action == "take" and number <= pool.free:
            free = sorted(set(range(RANGE_BLOCKS)) - set(contents))
            taken = pool.take(number)
            assert taken == free[:number], "the lowest free blocks, and only free ones"
            contents |= dict.fromkeys(taken, holder)
            if number:
                held[holder] = number
        elif action == "give" and held:
            holder_out = sorted(held)[number % len(held)]
            given_back = [block for block, owner in contents.items() if owner == holder_out]
            pool.give_back(given_back)
            assert len(given_back) == held.pop(holder_out)
            contents = {b: owner for b, owner in contents.items() if owner != holder_out}
        elif action == "resize" and number >= max(pool.used, 1):
            old, places = pool.taken(), pool.places_below(number)
            pool.resize(number, places)
            moves = dict(zip(old.tolist(), places.tolist(), strict=True))
            contents = {moves[block]: owner for block, owner in contents.items()}
        assert pool.used == len(contents) == sum(held.values())
        assert pool.used + pool.free == pool.blocks
        assert sorted(contents) == pool.taken().tolist()
        assert all(0 <= block < pool.blocks for block in contents)


def test_only_blocks_in_the_tail_move_and_into_the_lowest_holes() -> None:
    pool = BlockPool(8)
    pool.take(8)
    pool.give_back([1, 2, 4, 6])
    assert pool.taken().tolist() == [0, 3, 5, 7]
    places = pool.places_below(5)
    assert places.tolist() == [0, 3, 1, 2]
    pool.resize(5, places)
    assert (pool.blocks, pool.used, pool.take(1)) == (5, 4, [4])


def test_blocks_may_stay_where_they_are_and_bound_what_is_taken_by_number_alone() -> None:
    pool = BlockPool(8)
    pool.take(8)
    pool.give_back([0, 1, 2, 3, 4, 5])
    pool.resize(3, pool.taken())
    assert (pool.free, pool.taken().tolist()) == (1, [6, 7])
    assert pool.take(1) == [0]


def test_the_owner_of_the_memory_chooses_among_the_free_blocks() -> None:
    pool = BlockPool(4, range_blocks=8, choose=lambda free, count: free[-count:])
    assert pool.take(3) == [5, 6, 7]
    assert pool.take(1) == [4]


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    taken = pool.take(2)
    with pytest.raises(ValueError, match="1 KV blocks wanted, 0 free"):
        pool.take(1)
    with pytest.raises(ValueError, match="2 KV blocks are taken"):
        pool.resize(1, pool.taken())
    with pytest.raises(ValueError, match="2 KV blocks are taken"):
        pool.places_below(1)
    with pytest.raises(ValueError, match="the range has 2"):
        pool.resize(3, pool.taken())
    pool.give_back(taken[:1])
    with pytest.raises(ValueError, match="given back twice"):
        pool.give_back(taken[:1])
