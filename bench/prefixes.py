"""The share of a trace's prompt tokens that a prefix cache hits, by its size.

The trace tells what prompts are made of (Mooncake's `hash_ids`). Its requests come one after the
other through mesh's own block code, once with room for everything and at shares of the working set:
all that an unlimited cache comes to hold. Beside it, at the same sizes, a cache that forgets the
least recently used block wherever it stands in its prompt. The last line is one JSON object.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from bench.harness import Report, Table
from mesh.domain.errors import InvalidInput
from mesh.memory.block_keys import next_key, root_key
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh.sim.sequences import CountedPlaces
from mesh_workloads.reading import read
from mesh_workloads.trace import BLOCK_TOKENS, Arrival

SHARES = (0.05, 0.25, 1.0)
"""The sizes of the cache, as shares of the working set."""


def hit_tokens(arrivals: Sequence[Arrival], blocks_max: int) -> int:
    """With room for so many blocks. One token of each prompt is computed at least."""
    longest = max(len(arrival.blocks) for arrival in arrivals)
    budget = CacheBudget(max(blocks_max, longest))
    pool = KvBlocks(longest, CountedPlaces(), budget, overflows=True)
    hit = 0
    for arrival in arrivals:
        key, table, keys = root_key(""), list[int](), list[bytes]()
        for block in arrival.blocks:
            key = next_key(key, (block,))
            keys.append(key)
        for key in keys:
            found = pool.adopt(key)
            if found is None:
                break
            table.append(found)
        hit += min(len(table) * BLOCK_TOKENS, arrival.input_tokens - 1)
        fresh = pool.take(len(keys) - len(table))
        table += [pool.name(*one) for one in zip(fresh, keys[len(table) :], strict=True)]
        pool.release(table)
    return hit


def hit_tokens_lru(arrivals: Sequence[Arrival], blocks_max: int) -> int:
    """The same of a cache that knows no beginnings: the oldest block goes first."""
    kept: OrderedDict[int, None] = OrderedDict()
    hit = 0
    for arrival in arrivals:
        found = 0
        for block in arrival.blocks:
            if block not in kept:
                break
            found += 1
        hit += min(found * BLOCK_TOKENS, arrival.input_tokens - 1)
        for block in arrival.blocks:
            kept.pop(block, None)
            kept[block] = None
        while len(kept) > blocks_max:
            kept.popitem(last=False)
    return hit


def run(*traces: Annotated[Path, "a trace with `hash_ids`, as Mooncake publishes them"]) -> Report:
    (trace,) = traces
    arrivals = [arrival for arrival in read(trace).arrivals if arrival.blocks]
    if not arrivals:
        raise InvalidInput(f"{trace} does not say what its prompts are made of")
    prompts = sum(arrival.input_tokens for arrival in arrivals)
    blocks = len({block for arrival in arrivals for block in arrival.blocks})
    sizes = {f"{share:.0%}": int(blocks * share) for share in SHARES}
    shares = {
        name: (hit_tokens(arrivals, most) / prompts, hit_tokens_lru(arrivals, most) / prompts)
        for name, most in sizes.items()
    }
    table = Table(
        headings=("of the working set", "million tokens", "hit", "hit by blocks alone"),
        rows=[
            (name, f"{sizes[name] * BLOCK_TOKENS / 1e6:.1f}", f"{ours:.1%}", f"{lru:.1%}")
            for name, (ours, lru) in shares.items()
        ],
        title=f"{len(arrivals)} requests, {prompts / 1e6:.1f} million prompt tokens",
    )
    return Report(
        figures={
            "hit_share": {name: round(ours, 4) for name, (ours, _) in shares.items()},
            "hit_share_lru": {name: round(lru, 4) for name, (_, lru) in shares.items()},
            "working_set_tokens": blocks * BLOCK_TOKENS,
        },
        shown=[table],
    )
