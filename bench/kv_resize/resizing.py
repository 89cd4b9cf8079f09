"""Times resizes of one KV cache by the memory that is live in it, and sees where the memory goes.

Four of each size: a grow by a quarter with all blocks live; a shrink back once as many of them,
scattered, have come free; and two to one block, once all have, and while all are cached. The time
of a resize is that of the call, during which nothing can be computed; what goes back after it is
watched to its end.
"""

import random
import time
from dataclasses import dataclass

from bench.kv_resize.live import LiveInstance
from bench.kv_resize.resident import resident_bytes
from mesh_nodes.engines.openvino.kv_cache import KvResize

SPARE_SHARE = 0.25
RETURN_S_MAX = 60.0
GROW, SHRINK, EMPTY, CACHED = "grow", "shrink", "empty", "empty, all cached"
OPERATIONS = GROW, SHRINK, EMPTY, CACHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    how: KvResize
    operation: str
    live_gb: float
    """Before the resize, and after it; nothing is live in EMPTY and CACHED, which give so much
    back.
    """
    stall_s: float
    """That the call takes."""
    returned_s: float
    """From its begin until the books say that nothing is left to give back."""
    given_back_bytes: int
    """What the books hold less."""
    left_bytes: int
    """What the process holds less."""


def resizes(live: LiveInstance, gigabytes: float, draw: random.Random) -> list[Resize]:
    blocks = live.blocks(gigabytes)
    more = blocks + max(1, round(blocks * SPARE_SHARE))
    live.resize(blocks)
    live.fill(blocks)
    grown = _resize(live, GROW, gigabytes, more)
    live.fill(more - blocks)
    live.drop_to(blocks, draw)
    shrunk = _resize(live, SHRINK, gigabytes, max(blocks, live.used_blocks))
    live.fill(blocks - live.used_blocks)
    live.drop_to(0, draw)
    emptied = _resize(live, EMPTY, gigabytes, 1)
    live.resize(blocks)
    live.fill(blocks)
    live.keep()
    live.drop_to(0, draw)
    return [grown, shrunk, emptied, _resize(live, CACHED, gigabytes, 1)]


def _resize(live: LiveInstance, operation: str, gigabytes: float, blocks: int) -> Resize:
    held, resident = live.held_bytes, resident_bytes()
    start_s = time.perf_counter()
    live.resize(blocks)
    stall_s = time.perf_counter() - start_s
    target = blocks * live.block_bytes
    while live.held_bytes > target:
        if time.perf_counter() - start_s > RETURN_S_MAX:
            raise TimeoutError(f"{operation}: {live.held_bytes - target} bytes are still held")
        time.sleep(0.0005)
    returned_s = time.perf_counter() - start_s
    return Resize(
        how=live.how,
        operation=operation,
        live_gb=gigabytes,
        stall_s=stall_s,
        returned_s=returned_s,
        given_back_bytes=max(0, held - live.held_bytes),
        left_bytes=resident - resident_bytes(),
    )
