"""vLLM's own block pool, within a bound and by mesh's names of what blocks hold.

vLLM keeps the full blocks of requests that have ended and finds them by their hashes; here those
are the keys of `mesh.memory.block_keys`, so that what is told of them is what a controller looks
for. Used and cached blocks together are never more than the bound: what is wanted beyond that is
taken from the blocks that were let go the longest ago. Private parts of vLLM are touched here as
in `internals`, which comes before. After: vLLM.
"""

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_utils import BlockHash, FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from mesh.domain.steps import PrefixChange
from mesh.memory.block_keys import CachedDigests, digest_of, next_key, root_key
from mesh_nodes.engines.vllm.differences import installed_shape

_SHAPE = installed_shape()
NULL_BLOCKS = 1
"""Block 0 is vLLM's own and never a request's."""


def hasher(salt: str | None, block_tokens: int) -> Callable[[Request], list[BlockHash]] | None:
    """What vLLM asks for the hashes of a request's further full blocks; None: it shares nothing."""
    if salt is None:
        return None
    root = root_key(salt)

    def further(request: Request) -> list[BlockHash]:
        key = request.block_hashes[-1] if request.block_hashes else root
        first, keys = len(request.block_hashes) * block_tokens, []
        for begin in range(first, request.num_tokens - block_tokens + 1, block_tokens):
            key = next_key(key, request.all_token_ids[begin : begin + block_tokens])
            keys.append(BlockHash(key))
        return keys

    return further


class KvPool:
    """The block pool of one scheduler. Blocks go by their numbers. Requests to a model that keeps
    nothing in a KV cache hold none.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._requests: dict[str, Request] = scheduler.requests
        self._manager = scheduler.kv_cache_manager
        tables = self._manager.coordinator.single_type_managers
        self._tables: Any = tables[0] if tables else None
        self._held = tables[0].req_to_blocks if tables else {}
        """The blocks of each request, in the order of its tokens."""
        self._pool = self._manager.block_pool
        self._digests = CachedDigests()
        self._pool.cached_block_hash_to_block = _Named(self._digests)
        self._queue = _Free(self._pool.free_block_queue.get_all_free_blocks())
        self._pool.free_block_queue = self._queue
        self._withheld: list[KVCacheBlock] = []
        """Free blocks beyond the size in force."""

    @property
    def used(self) -> int:
        unused = self._queue.num_free_blocks + len(self._withheld)
        return int(self._pool.num_gpu_blocks - NULL_BLOCKS - unused)

    @property
    def cached(self) -> int:
        return self._queue.cached

    def kept(self) -> list[int]:
        """Blocks whose tokens are needed: those used and those cached, in ascending order."""
        blocks = self._pool.blocks[NULL_BLOCKS:]
        return [b.block_id for b in blocks if b.ref_cnt or b.block_hash is not None]

    def usable(self) -> list[int]:
        """Blocks that are used, cached, or may be taken."""
        used = {block.block_id for table in self._held.values() for block in table}
        return [*used, *(block.block_id for block in self._queue.get_all_free_blocks())]

    def tell(self) -> PrefixChange | None:
        """The keys that have come and gone since this was told last; `None` if none has."""
        return self._digests.tell()

    def forget_told(self) -> None:
        """Nobody knows of any key. Nothing may be used or cached."""
        while self.tell() is not None:
            pass

    def found_tokens(self, key: str) -> int:
        """Tokens that the request would not have to compute if it began now."""
        return int(self._manager.get_computed_blocks(self._requests[key])[1])

    def adopt(self, key: str, blocks_free: int) -> int:
        """Before the request computes: have it hold the blocks that are there of its tokens, as far
        as so many more may be used. For how many tokens it holds any then.
        """
        request, table = self._requests[key], self._held[key]
        found = self._manager.get_computed_blocks(request)[0].blocks[0]
        for block in found[len(table) :]:
            blocks_free -= block.ref_cnt == 0
            if blocks_free < 0:
                break
            self._pool.touch((block,))
            table.append(block)
        self._tables.num_cached_block[key] = len(table)
        request.num_computed_tokens = len(table) * self._tables.block_size
        return int(request.num_computed_tokens)

    def bound(self, blocks: int, *, dense: bool) -> list[tuple[int, int]]:
        """Use and cache so many blocks at most from now on; there must not be more in use. Cached
        ones go as far as they must, the oldest first. Dense: only blocks 1 to `blocks`; returns
        which have another number then, (from, to). Else it takes as long as it changes blocks.
        """
        if not dense:
            self._withhold(blocks - self.used - self._queue.num_free_blocks)
            return []
        free = [*self._queue.get_all_free_blocks(), *self._withheld]
        cached = [block for block in free if block.block_hash is not None]
        gone = max(self.used + len(cached) - blocks, 0)
        self._pool.evict_blocks({block.block_id for block in cached[:gone]})
        instead = self._pack(blocks, free)
        cached = [instead.get(block.block_id, block) for block in cached[gone:]]
        blank = [b for b in self._pool.blocks[NULL_BLOCKS:] if not (b.ref_cnt or b.block_hash)]
        left = blocks - self.used - len(cached)
        self._withheld = blank[left:]
        self._queue = _Free([*blank[:left], *cached])
        self._pool.free_block_queue = self._queue
        return [(old, new.block_id) for old, new in instead.items()]

    def _withhold(self, more: int) -> None:
        """Let so many more blocks be used, or fewer, below 0: blank ones go before cached ones."""
        gone = self._queue.popleft_n(max(-more, 0))
        self._pool.evict_blocks({block.block_id for block in gone})
        self._withheld += gone
        back = [self._withheld.pop() for _ in range(min(more, len(self._withheld)))]
        self._queue.prepend_n(back)

    def renumbered(self, moves: Iterable[tuple[int, int]]) -> set[str]:
        """Requests that hold a block which has moved; they hold it where it is from now on."""
        places = {old: self._pool.blocks[new] for old, new in moves}
        found = set()
        for key, table in self._held.items() if places else ():
            for place, block in enumerate(table):
                if block.block_id in places:
                    table[place] = places[block.block_id]
                    found.add(key)
        return found

    def _pack(self, blocks: int, free: Iterable[KVCacheBlock]) -> dict[int, KVCacheBlock]:
        """What is kept in numbers above `blocks` has another from now on."""
        low = [b for b in free if b.block_hash is None and b.block_id <= blocks]
        instead = {}
        for old in self._pool.blocks[blocks + NULL_BLOCKS :]:
            if old.ref_cnt or old.block_hash is not None:
                new = low.pop()
                new.ref_cnt, old.ref_cnt = old.ref_cnt, 0
                _SHAPE.move_hashes(self._pool, old, new)
                instead[old.block_id] = new
        return instead


class _Named(BlockHashToBlockMap):  # type: ignore[misc]
    """Notes the keys that come and go. vLLM lets blocks of two requests that compute the same at
    once have the same key.
    """

    def __init__(self, digests: CachedDigests) -> None:
        super().__init__()
        self._digests = digests

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        if self.get_one_block(key) is None:
            self._digests.came(digest_of(key))
        super().insert(key, block)

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        block = super().pop(key, block_id)
        if block is not None and self.get_one_block(key) is None:
            self._digests.went(digest_of(key))
        return block


class _Free(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """Counts those that are cached: the last ones, the oldest first."""

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        super().__init__(blocks)
        self.cached = _cached(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = super().popleft_n(n)
        self.cached -= _cached(blocks)
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        super().remove(block)
        self.cached -= _cached((block,))

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        self.cached += _cached(blocks)


def _cached(blocks: Iterable[KVCacheBlock]) -> int:
    return sum(block.block_hash is not None for block in blocks)
