"""What a node has to tell of the keys of an instance's blocks: those that came, those that went.

Owns what has not been told yet. A key that goes before it was told of was never there. Before:
`kv_blocks`. After: the node's reports.
"""

from itertools import islice

from mesh.domain.steps import PrefixChange

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
