"""The block pool gives no block twice, gives low ones first, and shrinks without losing one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_nodes.engines.openvino.blocks import BlockPool

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "give", "resize"]), st.integers(0, 40)), max_size=60
)


@given(blocks=st.integers(1, 40), actions=ACTIONS)
def test_holders_keep_their_blocks_through_any_history(
    blocks: int, actions: list[tuple[str, int]]
) -> None:
    """Each holder's contents follow the moves: after any history all of them are still there."""
    pool, held = BlockPool(blocks), dict[int, int]()
    contents: dict[int, int] = {}
    for holder, (action, number) in enumerate(actions):
        if action == "take" and number <= pool.free:
            free = sorted(set(range(pool.blocks)) - set(contents))
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
            moves = pool.moves_below(number)
            pool.resize(number)
            contents = {moves.get(block, block): owner for block, owner in contents.items()}
        assert pool.used == len(contents) == sum(held.values())
        assert pool.used + pool.free == pool.blocks
        assert all(0 <= block < pool.blocks for block in contents)


def test_only_blocks_in_the_tail_move_and_into_the_lowest_holes() -> None:
    pool = BlockPool(8)
    pool.take(8)
    pool.give_back([1, 2, 4, 6])
    assert pool.moves_below(5) == {5: 1, 7: 2}
    pool.resize(5)
    assert (pool.blocks, pool.used, pool.take(1)) == (5, 4, [4])


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    taken = pool.take(2)
    with pytest.raises(ValueError, match="1 KV blocks wanted, 0 free"):
        pool.take(1)
    with pytest.raises(ValueError, match="2 KV blocks are taken"):
        pool.resize(1)
    pool.give_back(taken[:1])
    with pytest.raises(ValueError, match="given back twice"):
        pool.give_back(taken[:1])
