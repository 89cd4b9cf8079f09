"""What the node core knows of the cached KV blocks of one instance, as its engine tells."""

from collections.abc import Sequence
from dataclasses import field
from itertools import islice

from mesh.domain.steps import PrefixChange
from mesh.domain.values import dataclass

DIGESTS_MAX = 32_768
"""The most digests that are kept of an instance and told in a hello: 256 KiB on the wire."""


@dataclass(slots=True, eq=False)
class LocalCache:
    in_use: bool = False
    """Requests have come that share what they compute."""
    digests: dict[int, None] = field(default_factory=dict)
    """The digests of the keys of its KV blocks, the newest last; see `PrefixChange`."""
    kv_blocks: int = 0
    """Cached ones, as of the last heartbeat."""

    def note_request(self, cache_salt: str | None) -> None:
        """A request has come; without a salt it shares nothing."""
        self.in_use = self.in_use or cache_salt is not None

    def note_all(self, digests: Sequence[int]) -> None:
        """The instance is loaded, and has found these."""
        self.digests = dict.fromkeys(digests[-DIGESTS_MAX:])
        self.in_use = self.in_use or bool(self.digests)

    def note_change(self, change: PrefixChange) -> None:
        """Blocks with these keys have come and gone; the newest are known."""
        self.digests.update(dict.fromkeys(change.came))
        for digest in change.went:
            self.digests.pop(digest, None)
        for digest in tuple(islice(self.digests, max(len(self.digests) - DIGESTS_MAX, 0))):
            del self.digests[digest]

    def note_blocks(self, kv_blocks: int) -> None:
        self.kv_blocks = kv_blocks
