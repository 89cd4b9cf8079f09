"""The KV blocks of one instance: each is free, used by requests, or cached for those to come.

A full block has a key (`block_keys`). Requests with the same beginning share its blocks, which are
counted by reference. What its last holder lets go stays cached as long as memory allows, the least
recently used out first, leaves before their parents. Before: an engine's requests. After:
`cache_budget`, which bounds what is cached; the engine's memory (`Places`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from mesh.domain.steps import PrefixChange
from mesh.memory.block_keys import CachedDigests, digest_of
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.shared_weights import SharedWeights


class Places(Protocol):
    """Where blocks lie: which of an instance's numbers are free, and the memory under them."""

    @property
    def total(self) -> int:
        """Numbers that there are."""
        ...

    def claim(self, count: int) -> list[int]:
        """Takes this many free blocks, to be written."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """They are free. Raises ValueError when one is so already."""
        ...

    def forget(self, blocks: Sequence[int]) -> None:
        """The same of cached ones whose memory is wanted."""
        ...


class KvBlocks:
    """At most `blocks` are used at once. Used and cached ones together may be more than that where
    the instance `overflows`, as far as the budget allows; else never.
    """

    def __init__(
        self,
        blocks: int,
        places: Places,
        budget: CacheBudget,
        *,
        block_bytes: int = 1,
        weights_bytes: int = 0,
        overflows: bool = False,
    ) -> None:
        self.blocks = blocks
        self.used = 0
        self.block_bytes = block_bytes
        self.weights_bytes = weights_bytes
        self.shared: SharedWeights | None = None
        """The part of the weights that other instances of the budget hold, too."""
        self.overflows = overflows
        self._digests = CachedDigests()
        self._places = places
        self._budget = budget
        self._blocks: dict[bytes, int] = {}
        """Named ones, by key."""
        self._keys: dict[int, bytes] = {}
        """The same, by block."""
        self._holders: dict[int, int] = {}
        """For each named block that is used, how many requests use it."""
        self._cached: dict[int, int] = {}
        """The budget's tick when each was freed: the oldest first, children before parents."""
        budget.add(self)

    @property
    def free(self) -> int:
        """How many blocks may still be used."""
        return self.blocks - self.used

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def extra(self) -> int:
        """The blocks that are used or cached beyond the size in force: memory that nobody has been
        promised.
        """
        return max(self.used + len(self._cached) - self.blocks, 0)

    @property
    def excess(self) -> int:
        """Cached ones that may not stay, however much room there is."""
        most = self._places.total if self.overflows else self.blocks
        return max(self.used + len(self._cached) - most, 0)

    @property
    def oldest(self) -> int:
        """When its oldest cached block was let go. There is one."""
        return next(iter(self._cached.values()))

    def take(self, count: int) -> list[int]:
        """Blocks to be written. Raises ValueError when fewer than `count` may still be used."""
        with self._budget.lock:
            if count > self.free:
                raise ValueError(f"{count} KV blocks wanted, {self.free} free")
            self.used += count
            if self._cached:
                self._budget.fit(self)
            return self._places.claim(count)

    def count(self, more: int) -> None:
        """Counts so many more blocks as used, of which nobody asks where they lie; or fewer, below
        0.
        """
        self.used += more
        if self._cached:
            self._budget.fit(self)

    def holds(self, key: bytes) -> bool:
        return key in self._blocks

    def adopt(self, key: bytes) -> int | None:
        """Hold the block of this key, too; None if it is not there or none may be used any more."""
        with self._budget.lock:
            block = self._blocks.get(key)
            if block is None or (block in self._cached and not self.free):
                return None
            self._hold(block)
            return block

    def name(self, block: int, key: bytes) -> int:
        """A used block is full and holds what the key says. Returns the one that its holder has
        from now on: another, if there is one with this key.
        """
        with self._budget.lock:
            known = self._blocks.get(key)
            if known is not None:
                self.used -= 1
                self._places.release((block,))
                self._hold(known)
                return known
            self._blocks[key] = block
            self._keys[block] = key
            self._holders[block] = 1
            self._digests.came(digest_of(key))
            return block

    def release(self, blocks: Sequence[int]) -> None:
        """A request needs its blocks, in the order of its tokens, no more. Raises ValueError when
        one of them is not used.
        """
        with self._budget.lock:
            now, freed = self._budget.tick(), []
            for block in reversed(blocks):
                holders = self._holders.get(block)
                if holders is None and block in self._keys:
                    raise ValueError(f"KV block {block} is given back twice")
                if holders is None:
                    freed.append(block)
                elif holders > 1:
                    self._holders[block] = holders - 1
                    continue
                else:
                    del self._holders[block]
                    self._cached[block] = now
                self.used -= 1
            self._places.release(freed)
            if self._cached:
                self._budget.fit(self)

    def resize(self, blocks: int) -> None:
        """Sets how many blocks are in force. Raises ValueError when more are used."""
        with self._budget.lock:
            if self.used > blocks:
                raise ValueError(f"{self.used} KV blocks are used: no resize to {blocks}")
            self.blocks = blocks
            self._budget.fit(self)

    def move(self, places: Mapping[int, int]) -> None:
        """Renumbers used and cached blocks, which lie elsewhere from now on; those that are not
        named stay.
        """
        with self._budget.lock:
            self._keys = {places.get(block, block): key for block, key in self._keys.items()}
            self._blocks = {key: block for block, key in self._keys.items()}
            self._holders = {places.get(block, block): n for block, n in self._holders.items()}
            self._cached = {places.get(block, block): at for block, at in self._cached.items()}

    def forget_oldest(self) -> int:
        """One cached block is free; its memory is the caller's to give back, by `forgotten`."""
        block = next(iter(self._cached))
        del self._cached[block]
        key = self._keys.pop(block)
        del self._blocks[key]
        self._digests.went(digest_of(key))
        return block

    def forgotten(self, blocks: Sequence[int]) -> None:
        self._places.forget(blocks)

    def tell(self) -> PrefixChange | None:
        """What has come and gone since it was told last; None if nothing has."""
        with self._budget.lock:
            return self._digests.tell()

    def outlive(self) -> None:
        """Its instance is unloaded, and none of its blocks is used any more. Those that are cached
        stay for the next one, in memory that nobody has been promised, and are told of anew. Raises
        ValueError when some are still used.
        """
        with self._budget.lock:
            if self.used:
                raise ValueError(f"{self.used} KV blocks are still used")
            self.blocks, self.weights_bytes, self.shared = 0, 0, None
            self._digests = CachedDigests()
            for key in self._blocks:
                self._digests.came(digest_of(key))
            self._budget.fit(self)

    def begin_again(self, weights_bytes: int, shared: SharedWeights | None) -> tuple[int, ...]:
        """The next instance is loaded. Returns the digests of all keys that it finds; from now on
        `tell` says how those change.
        """
        with self._budget.lock:
            self.weights_bytes, self.shared = weights_bytes, shared
            self._digests = CachedDigests()
            return tuple([digest_of(key) for key in self._blocks])

    def close(self) -> None:
        """Nothing is used or cached any more; the memory goes with the instance."""
        with self._budget.lock:
            self._budget.remove(self)
            self._blocks, self._keys, self._holders, self._cached = {}, {}, {}, {}
            self.used = 0

    def named(self) -> Iterator[tuple[bytes, int]]:
        """For those who look at it from outside: keys and their blocks."""
        return iter(self._blocks.items())

    def holders(self, block: int) -> int:
        """The same: of a named block."""
        return self._holders.get(block, 0)

    def _hold(self, block: int) -> None:
        if self._cached.pop(block, None) is not None:
            self.used += 1
        self._holders[block] = self._holders.get(block, 0) + 1
