"""What a cache hits of a trace, counted by hand."""

from bench.prefixes import hit_tokens, hit_tokens_lru
from mesh_workloads.trace import Arrival

TRACE = [
    Arrival(
        t_s=float(n), function=0, input_tokens=512 * len(blocks), output_tokens=1, blocks=blocks
    )
    for n, blocks in enumerate([(1, 2), (1, 3), (4, 5), (1, 2), (1, 3)])
]


def test_with_room_for_all_of_it_each_block_is_computed_once() -> None:
    hit = 512 + (2 * 512 - 1) * 2
    assert hit_tokens(TRACE, 5) == hit_tokens_lru(TRACE, 5) == hit


def test_with_less_the_oldest_goes_and_a_beginning_outlives_what_follows_it() -> None:
    assert hit_tokens(TRACE, 4) == 512 + 512 + 512
    assert hit_tokens(TRACE, 2) == 512 + 512
