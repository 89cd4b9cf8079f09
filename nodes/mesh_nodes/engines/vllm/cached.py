"""What one engine process keeps cached beyond its size in force, in the agent's books.

Implements what `mesh.memory.cache_budget` bounds: the budget divides memory that nobody has been
promised among all instances of the node. The instance used the longest ago frees its blocks first,
within one call of its process. Before: `engine`, at resizes, loads and bounds. After: `remote`.
"""

from contextlib import suppress
from typing import cast

from mesh.domain.errors import EngineError
from mesh.domain.model import Footprint
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.shared_weights import SharedWeights
from mesh_nodes.engines.vllm.messages import Verb
from mesh_nodes.engines.vllm.remote import Remote


class CachedBlocks:
    """What one loaded instance keeps cached. Its methods run under the budget's lock, except
    `note_use`.
    """

    excess = 0
    """The process sees to that by itself."""
    shared: SharedWeights | None = None
    """Each process has weights of its own."""

    def __init__(
        self,
        remote: Remote,
        budget: CacheBudget,
        footprint: Footprint,
        kv_blocks: int,
        overflows: bool,
    ) -> None:
        """`overflows`: its process can keep blocks beyond the size in force."""
        self.blocks = kv_blocks
        self.block_bytes = footprint.kv_block_bytes
        self.weights_bytes = footprint.instance_bytes(0)
        self.extra = 0
        """Its process may keep so many cached ones beyond the size in force."""
        self.oldest = budget.tick()
        """When it was last used, on the budget's clock."""
        self._remote = remote
        self._budget = budget
        self._overflows = overflows
        budget.add(self)

    def note_use(self) -> None:
        self.oldest = self._budget.tick()

    def note_weights(self) -> None:
        """Its weights may have gone or come."""
        books = self._remote.books
        with self._budget.lock:
            self.weights_bytes = 0 if books is None else books.weights_bytes

    def make_room(self) -> None:
        """Blocks are about to be used: what is cached stays as far as the budget allows."""
        with self._budget.lock:
            before = self.extra
            self._keep_all(self.blocks)
            if self.extra != before:
                self.forgotten([])

    def resize(self, kv_blocks: int) -> int:
        """Puts so many blocks in force; what is cached stays as far as the budget allows.
        Returns how many are in force then. Raises what the process refuses with.
        """
        with self._budget.lock:
            self._keep_all(kv_blocks)
            try:
                return cast(int, self._remote.call(Verb.RESIZE, kv_blocks, self.extra))
            finally:
                books = self._remote.books
                self.blocks = kv_blocks if books is None else books.kv_blocks

    def remove(self) -> None:
        with self._budget.lock:
            self._budget.remove(self)

    def forget_oldest(self) -> int:
        """Forgets one block; the process decides which, and says so by `forgotten`."""
        self.extra -= 1
        return 0

    def forgotten(self, blocks: list[int]) -> None:
        """A process that is gone has forgotten all."""
        with suppress(EngineError):
            self._remote.call(Verb.KEEP, self.extra)

    def _keep_all(self, kv_blocks: int) -> None:
        books = self._remote.books
        self.blocks = kv_blocks
        self.extra = books.kv_blocks_cached if books is not None and self._overflows else 0
        self._budget.fit(self)
