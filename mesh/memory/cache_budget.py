"""How much of a node's memory cached KV blocks may take: what nobody has been promised.

Instances are booked with their weights and the KV size in force, loads from their beginning. What
is left of the node's memory holds cached blocks beyond the sizes in force; as soon as it is less
than they take, the oldest of all instances go. So they cost nobody anything: nothing waits for
them, nothing is refused for them. Before: `kv_blocks`; loads. After: nothing.
"""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from mesh.memory.shared_weights import SharedWeights, counted_once


class CachingBlocks(Protocol):
    """See `kv_blocks.KvBlocks`."""

    blocks: int
    block_bytes: int
    weights_bytes: int
    """What its instance holds beside blocks: weights, and what stays where these have left."""
    shared: SharedWeights | None

    @property
    def extra(self) -> int: ...
    @property
    def excess(self) -> int: ...
    @property
    def oldest(self) -> int: ...
    def forget_oldest(self) -> int: ...
    def forgotten(self, blocks: list[int]) -> None: ...


class CacheBudget:
    """The memory that one engine's cached blocks share. `lock` guards it and all blocks in it where
    several threads come.
    """

    def __init__(
        self, memory_bytes: int = 0, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self.lock = lock or nullcontext()
        self._memory_bytes = memory_bytes
        """For all instances together. Nothing is cached beyond sizes in force where it is 0."""
        self._members: list[CachingBlocks] = []
        self._loading: dict[Hashable, int] = {}
        self._ticks: Iterator[int] = count()

    def tick(self) -> int:
        return next(self._ticks)

    def add(self, blocks: CachingBlocks) -> None:
        with self.lock:
            self._members.append(blocks)

    def remove(self, blocks: CachingBlocks) -> None:
        """Nothing happens where they are not there."""
        if blocks in self._members:
            self._members.remove(blocks)

    def bound(self, memory_bytes: int) -> None:
        """Sets how much memory all instances may take from now on."""
        with self.lock:
            self._memory_bytes = memory_bytes
            self._fit_all()

    def begin_load(self, instance: Hashable, instance_bytes: int) -> int:
        """It takes so much from now on, until its blocks are added and `end_load`. Returns the
        bytes of the cached blocks that go for it; their pages may be given back a little later.
        """
        with self.lock:
            self._loading[instance] = instance_bytes
            return self._fit_all()

    def end_load(self, instance: Hashable) -> None:
        with self.lock:
            self._loading.pop(instance, None)

    def fit(self, blocks: CachingBlocks) -> None:
        """They are more, or fewer may be: the oldest cached ones go as far as they must."""
        excess = blocks.excess
        if excess:
            blocks.forgotten([blocks.forget_oldest() for _ in range(excess)])
        self._fit_all()

    def _fit_all(self) -> int:
        """Returns the bytes of the cached blocks that go."""
        extra = {n: m.extra for n, m in enumerate(self._members) if m.extra}
        if not extra:
            return 0
        members = self._members
        over_bytes = sum(members[n].block_bytes * blocks for n, blocks in extra.items())
        over_bytes -= max(self._unbooked_bytes(), 0)
        if over_bytes <= 0:
            return 0
        oldest = [(members[n].oldest, n) for n in extra]
        heapify(oldest)
        gone: dict[int, list[int]] = {}
        begin_bytes = over_bytes
        while over_bytes > 0:
            _, n = heappop(oldest)
            gone.setdefault(n, []).append(members[n].forget_oldest())
            over_bytes -= members[n].block_bytes
            extra[n] -= 1
            if extra[n]:
                heappush(oldest, (members[n].oldest, n))
        for n, blocks in gone.items():
            members[n].forgotten(blocks)
        return begin_bytes - over_bytes

    @property
    def spare_bytes(self) -> int:
        """The memory that neither is booked nor holds cached blocks. It is below 0 where more is
        booked than there is.
        """
        with self.lock:
            extra_bytes = sum(m.extra * m.block_bytes for m in self._members)
            return self._unbooked_bytes() - extra_bytes

    def _unbooked_bytes(self) -> int:
        weights_bytes = sum(counted_once([(m.weights_bytes, m.shared) for m in self._members]))
        booked_bytes = weights_bytes + sum(m.blocks * m.block_bytes for m in self._members)
        return self._memory_bytes - booked_bytes - sum(self._loading.values())
