"""Numbers of blocks: none is given twice, low ones come first, and a shrink loses none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_nodes.engines.openvino.blocks import BlockPlaces
from tests.nodes.engines.openvino.pools import NoPages, pool_of

TOTAL = 40
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "give", "resize"]), st.integers(0, 40)), max_size=60
)


def places_of(taken: int, total: int = 8) -> BlockPlaces:
    places = BlockPlaces(NoPages(), blocks=total, total=total)
    places.claim(taken)
    return places


@given(actions=ACTIONS)
def test_holders_keep_their_blocks_through_any_history(actions: list[tuple[str, int]]) -> None:
    """Each holder's contents follow the moves: after any history all of them are still there."""
    places, held = places_of(0, TOTAL), dict[int, int]()
    contents: dict[int, int] = {}
    for holder, (action, number) in enumerate(actions):
        if action == "take" and number <= TOTAL - len(contents):
            free = sorted(set(range(TOTAL)) - set(contents))
            taken = places.claim(number)
            assert taken == free[:number], "the lowest free blocks, and only free ones"
            contents |= dict.fromkeys(taken, holder)
            if number:
                held[holder] = number
        elif action == "give" and held:
            holder_out = sorted(held)[number % len(held)]
            given_back = [block for block, owner in contents.items() if owner == holder_out]
            places.release(given_back)
            assert len(given_back) == held.pop(holder_out)
            contents = {b: owner for b, owner in contents.items() if owner != holder_out}
        elif action == "resize" and number >= max(len(contents), 1):
            old, below = places.taken(), places.places_below(number)
            places.resize(number, below)
            moves = dict(zip(old.tolist(), below.tolist(), strict=True))
            contents = {moves[block]: owner for block, owner in contents.items()}
            assert all(block < number for block in contents)
        assert sorted(contents) == places.taken().tolist()


def test_only_blocks_in_the_tail_move_and_into_the_lowest_holes() -> None:
    places = places_of(8)
    places.release([1, 2, 4, 6])
    assert places.taken().tolist() == [0, 3, 5, 7]
    below = places.places_below(5)
    assert below.tolist() == [0, 3, 1, 2]
    places.resize(5, below)
    assert places.claim(1) == [4]


def test_misuse_is_an_error() -> None:
    pool = pool_of(2)
    taken = pool.take(2)
    with pytest.raises(ValueError, match="1 KV blocks wanted, 0 free"):
        pool.take(1)
    with pytest.raises(ValueError, match="2 KV blocks are used"):
        pool.resize(1)
    pool.release(taken[:1])
    with pytest.raises(ValueError, match="given back twice"):
        pool.release(taken[:1])
