"""Which KV blocks of one instance are taken: the pool behind all its block tables.

Low blocks go out first, so that a shrink finds the tail mostly empty. `kv_cache` owns the memory
that the block numbers stand for; `instance` moves tokens as `moves_below` says.
"""

import heapq

import numpy as np


class BlockPool:
    """Blocks 0 to `blocks` - 1, each free or taken once."""

    def __init__(self, blocks: int) -> None:
        self._taken = np.zeros(blocks, np.bool_)
        self._free = list(range(blocks))
        """A heap; a sorted list is one."""

    @property
    def blocks(self) -> int:
        return int(self._taken.size)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.blocks - self.free

    def take(self, count: int) -> list[int]:
        """The lowest free blocks. Raises ValueError when fewer than `count` are free."""
        if count > self.free:
            raise ValueError(f"{count} KV blocks wanted, {self.free} free")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._taken[blocks] = True
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Raises ValueError when one of them is not taken."""
        for block in blocks:
            if not self._taken[block]:
                raise ValueError(f"KV block {block} is given back twice")
            self._taken[block] = False
            heapq.heappush(self._free, block)

    def moves_below(self, blocks: int) -> dict[int, int]:
        """Where each taken block from `blocks` on must go for a shrink to `blocks`: the lowest
        free places. Raises ValueError when more than `blocks` are taken.
        """
        if self.used > blocks:
            raise ValueError(
                f"{self.used} KV blocks are taken, no shrink to {blocks} can hold them"
            )
        tail = np.flatnonzero(self._taken[blocks:]) + blocks
        holes = np.flatnonzero(~self._taken[:blocks])[: tail.size]
        return dict(zip(tail.tolist(), holes.tolist(), strict=True))

    def resize(self, blocks: int) -> None:
        """Grow, or shrink once `moves_below(blocks)` has been carried out, which this assumes."""
        moves = self.moves_below(blocks)
        taken = np.zeros(blocks, np.bool_)
        kept = min(blocks, self.blocks)
        taken[:kept] = self._taken[:kept]
        taken[list(moves.values())] = True
        self._taken = taken
        self._free = np.flatnonzero(~taken).tolist()
