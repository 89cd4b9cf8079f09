"""One request's way along its tokens' keys: blocks that it finds, and blocks that it names.

The same for every engine; the engine has the tokens and the block table, `kv_blocks` the blocks.
It owns how far the request's blocks have keys.
"""

from collections.abc import Iterable
from typing import Protocol

from mesh.memory.block_keys import next_key, root_key
from mesh.memory.kv_blocks import KvBlocks


class Tokens(Protocol):
    """A list of token ids or an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: slice, /) -> Iterable[int]: ...


class Table(Protocol):
    """The same of block numbers."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, block: int, /) -> None: ...


class PrefixWalk:
    """`tokens` are the request's in all calls, as far as they are known; `table` has the numbers of
    its blocks, of which only those that hold tokens are looked at.
    """

    def __init__(self, salt: str, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.root = self._key = root_key(salt)
        """The key of the last block that has one."""
        self._named = 0
        """Blocks with keys, the first ones of its table."""
        self.adopted_tokens = 0
        """How many tokens other requests have computed."""

    def found_tokens(self, tokens: Tokens, blocks: KvBlocks) -> int:
        """Tokens that it would not have to compute if it began now."""
        key, found, size = self._key, 0, self._block_tokens
        while found + size < len(tokens):
            key = next_key(key, tokens[found : found + size])
            if not blocks.holds(key):
                break
            found += size
        return found

    def adopt(self, tokens: Tokens, computed: int, table: Table, blocks: KvBlocks) -> int:
        """Take the blocks that hold what comes after its `computed` tokens, all of them in full
        blocks; of `tokens` one at least is left. Returns for how many tokens.
        """
        size, begin = self._block_tokens, computed
        while computed + size < len(tokens):
            key = next_key(self._key, tokens[computed : computed + size])
            block = blocks.adopt(key)
            if block is None:
                break
            table[self._named] = block
            self._key, self._named = key, self._named + 1
            computed += size
        self.adopted_tokens += computed - begin
        return computed - begin

    def name(self, tokens: Tokens, computed: int, table: Table, blocks: KvBlocks) -> None:
        """Names the full blocks among so many computed tokens: they are there for others as well.
        Where another has computed the same, it has that one's from now on.
        """
        size = self._block_tokens
        while (end := (self._named + 1) * size) <= computed:
            self._key = next_key(self._key, tokens[end - size : end])
            table[self._named] = blocks.name(table[self._named], self._key)
            self._named += 1
