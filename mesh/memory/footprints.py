"""What instances of a shape are booked at, from what an engine states and what was seen of them.

An engine states a footprint from the model's shape alone, on the safe side. What instances of that
shape have really held, each over its whole life, corrects it: up at once, down only when it has
been seen often enough, and never below the most that any of them has held. Before: an engine that
sees its process's memory move. After: its footprints, by which the controller books.
"""

from mesh.domain.values import dataclass, replace

SEEN_MIN = 3
"""Whole lives before less is booked than stated."""
MARGIN_SHARE = 0.02
"""Over the most that was seen: allocators round, and pages of files come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What instances of one shape have held beside their KV caches."""

    most_bytes: int = 0
    """The bytes of the largest of them."""
    lives: int = 0
    """Whole ones, from a load to an unload, in which it computed as much as instances do."""

    def after(self, held_bytes: int, *, whole: bool) -> "Seen":
        """One more has gone. What one held that hardly computed anything is a lower bound only."""
        most_bytes = max(self.most_bytes, held_bytes)
        return replace(self, most_bytes=most_bytes, lives=self.lives + whole)


def booked_bytes(stated_bytes: int, seen: Seen | None) -> int:
    """What an instance is booked at, beside its KV cache, by what its engine states and what was
    seen of its shape. Never less than the most that was seen.
    """
    if seen is None:
        return stated_bytes
    held_bytes = int(seen.most_bytes * (1.0 + MARGIN_SHARE)) + 1
    return held_bytes if seen.lives >= SEEN_MIN else max(stated_bytes, held_bytes)
