"""What several instances of a node hold together: the weights of one model, compiled once.

An engine that shares keeps them once for all of its instances with the same key; the books count
them once as well, at the most that one of those holds of them. Before: footprints, which say how
much of an instance that is. After: the reservation station, an engine's books, room for cached
blocks.
"""

from collections.abc import Hashable, Iterable

from mesh.domain.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """The part of what an instance holds that all instances with its key hold together."""

    key: Hashable
    size_bytes: int


def counted_once(sizes: Iterable[tuple[int, SharedWeights | None]]) -> list[int]:
    """For each instance, in their order, the bytes that none before it has. `sizes` has the bytes
    of each and the part that it shares.
    """
    there: dict[Hashable, int] = {}
    counted = []
    for size_bytes, shared in sizes:
        if shared is not None:
            shared_bytes, known_bytes = min(shared.size_bytes, size_bytes), there.get(shared.key, 0)
            there[shared.key] = max(shared_bytes, known_bytes)
            size_bytes -= min(shared_bytes, known_bytes)
        counted.append(size_bytes)
    return counted
