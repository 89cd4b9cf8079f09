"""Names of full KV blocks: a hash over what a block holds and all that came before it.

Two blocks with the same key hold the same keys and values, since those follow from the tokens up to
there. The salt keeps callers apart that are to learn nothing of each other. Before: engines, which
name what they have computed, and the controller, which looks for a prompt's blocks on nodes.

What a node has not yet told of the keys that came and went is kept here, too; a key that goes
before it was told of was never there.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

from mesh.domain.steps import PrefixChange

KEY_BYTES = 16
"""Collisions would hand one caller another's tokens: 2^64 blocks for an even chance of one."""
DIGEST_BYTES = 8
"""The digest of a key as nodes report it has so many bytes: a collision only misleads a
forecast.
"""


def root_key(salt: str) -> bytes:
    """The parent of first blocks, of all prompts with this salt."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def next_key(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """The key of the block with these tokens that follows the parent's block."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


def keys_of(token_ids: Sequence[int], block_tokens: int, salt: str) -> Iterator[bytes]:
    """The keys of all full blocks, in their order."""
    key = root_key(salt)
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        key = next_key(key, token_ids[end - block_tokens : end])
        yield key


def digests_of(
    token_ids: Sequence[int], sizes: Iterable[int], salt: str | None
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The digests of the keys of all full blocks, for each block size; none without a salt."""
    if salt is None:
        return ()
    return tuple(
        (size, tuple([digest_of(key) for key in keys_of(token_ids, size, salt)]))
        for size in sorted(set(sizes))
    )


def digest_of(key: bytes) -> int:
    """The digest of a key as nodes report it, 64 bits."""
    return int.from_bytes(key[:DIGEST_BYTES], "little")


TOLD_MAX = 1024
"""Digests in one change; what is left is told with the next."""


class CachedDigests:
    def __init__(self) -> None:
        self._came: dict[int, None] = {}
        self._went: dict[int, None] = {}

    def came(self, digest: int) -> None:
        _note(digest, self._came, self._went)

    def went(self, digest: int) -> None:
        _note(digest, self._went, self._came)

    def tell(self) -> PrefixChange | None:
        """What has not been told; None if there is nothing."""
        if not self._came and not self._went:
            return None
        return PrefixChange(came=_popped(self._came), went=_popped(self._went))


def _note(digest: int, happened: dict[int, None], reverse: dict[int, None]) -> None:
    if digest in reverse:
        del reverse[digest]
    else:
        happened[digest] = None


def _popped(digests: dict[int, None]) -> tuple[int, ...]:
    told = tuple(islice(digests, TOLD_MAX))
    for digest in told:
        del digests[digest]
    return told
