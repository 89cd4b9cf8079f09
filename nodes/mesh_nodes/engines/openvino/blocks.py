"""Which KV blocks of one instance are taken: the pool behind all its block tables.

Blocks are numbered over the whole range that the cache may come to; its size in force bounds how
many of them are taken at once. `kv_cache` owns the memory that the numbers stand for and chooses
among the free ones; `instance` carries a resize out on both.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]
Choose = Callable[[Blocks, int], Blocks]
"""So many of these free blocks, which are in ascending order."""


def lowest(free: Blocks, count: int) -> Blocks:
    return free[:count]


class BlockPool:
    """Blocks 0 to `range_blocks` - 1, each free or taken once; at most `blocks` are taken."""

    def __init__(
        self, blocks: int, *, range_blocks: int | None = None, choose: Choose = lowest
    ) -> None:
        """`range_blocks`: as many as `blocks` unless given."""
        self._taken = np.zeros(range_blocks or blocks, np.bool_)
        self._choose = choose
        self.blocks = blocks
        self.used = 0

    @property
    def free(self) -> int:
        return self.blocks - self.used

    def take(self, count: int) -> list[int]:
        """Free blocks. Raises ValueError when fewer than `count` may still be taken."""
        if count > self.free:
            raise ValueError(f"{count} KV blocks wanted, {self.free} free")
        chosen = self._choose(np.flatnonzero(~self._taken), count)
        self._taken[chosen] = True
        self.used += count
        return [int(block) for block in chosen]

    def give_back(self, blocks: list[int]) -> None:
        """Raises ValueError when one of them is not taken."""
        for block in blocks:
            if not self._taken[block]:
                raise ValueError(f"KV block {block} is given back twice")
            self._taken[block] = False
        self.used -= len(blocks)

    def taken(self) -> Blocks:
        """In ascending order."""
        return np.flatnonzero(self._taken)

    def places_below(self, blocks: int) -> Blocks:
        """Where each of `taken` goes so that all are below `blocks`: those from there on to the
        lowest free places. Raises ValueError when more than `blocks` are taken.
        """
        self._check(blocks)
        places = self.taken()
        tail = places >= blocks
        places[tail] = np.flatnonzero(~self._taken[:blocks])[: np.count_nonzero(tail)]
        return places

    def resize(self, blocks: int, places: Blocks) -> None:
        """Grow or shrink; each of `taken` is at its place from now on. Raises ValueError when more
        than `blocks` are taken, or when the range has fewer.
        """
        self._check(blocks)
        self._taken[:] = False
        self._taken[places] = True
        self.blocks = blocks

    def _check(self, blocks: int) -> None:
        if not self.used <= blocks <= self._taken.size:
            raise ValueError(
                f"{self.used} KV blocks are taken, the range has {self._taken.size}: "
                f"no resize to {blocks}"
            )
