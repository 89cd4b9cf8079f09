"""Which numbers of an instance's KV blocks are taken, and what becomes of the pages under them.

Blocks are numbered over the whole range that the cache may come to; which of them are used and
which are cached is `mesh.memory.kv_blocks`' to say. `kv_cache` owns the memory that the numbers
stand for and chooses among the free ones; `instance` carries a resize out on both.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]


class Pages(Protocol):
    """What numbers of blocks have to do with memory; see `kv_cache.KvCache`."""

    def claim(self, free: Blocks, count: int) -> Blocks: ...
    def trim(self, kept: Blocks, keep: int) -> None: ...


class BlockPlaces:
    """Implements `mesh.memory.kv_blocks.Places`: numbers 0 to `total` - 1, each free or taken."""

    def __init__(self, cache: Pages | None, *, blocks: int, total: int) -> None:
        """`blocks` are in force. None are claimed before there is a cache."""
        self._taken = np.zeros(total, np.bool_)
        self.cache = cache
        self._blocks = blocks

    @property
    def total(self) -> int:
        return int(self._taken.size)

    def claim(self, count: int) -> list[int]:
        assert self.cache is not None
        chosen = self.cache.claim(np.flatnonzero(~self._taken), count)
        self._taken[chosen] = True
        return [int(block) for block in chosen]

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self._taken[block]:
                raise ValueError(f"KV block {block} is given back twice")
            self._taken[block] = False

    def forget(self, blocks: Sequence[int]) -> None:
        """Their pages go, but for those that the size in force may need again."""
        self.release(blocks)
        assert self.cache is not None
        self.cache.trim(self.taken(), keep=self._blocks)

    def taken(self) -> Blocks:
        """In ascending order."""
        return np.flatnonzero(self._taken)

    def places_below(self, blocks: int) -> Blocks:
        """Where each of `taken` goes so that all are below `blocks`: those from there on to the
        lowest free places. No more than `blocks` are taken.
        """
        places = self.taken()
        tail = places >= blocks
        places[tail] = np.flatnonzero(~self._taken[:blocks])[: np.count_nonzero(tail)]
        return places

    def resize(self, blocks: int, places: Blocks) -> None:
        """Sets how many blocks are in force; each of `taken` is at its place from now on."""
        self._taken[:] = False
        self._taken[places] = True
        self._blocks = blocks


def runs(*numbers: Blocks) -> list[tuple[int, int]]:
    """Where these arrays of equal length rise by one, all of them: as [begin, end) of their
    indices."""
    if not numbers[0].size:
        return []
    breaks = np.zeros(numbers[0].size - 1, np.bool_)
    for array in numbers:
        breaks |= np.diff(array) != 1
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), numbers[0].size]
    return list(pairwise(edges))
