"""Which instance computes next on a node: the one that holds the request with the least headroom.

Token-level scheduling of LLM-Mesh §5.1. The node core asks before every iteration.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from mesh.domain.ids import InstanceId


class Turnable(Protocol):
    """An instance that could be given a turn."""

    @property
    def instance_id(self) -> InstanceId: ...

    def least_headroom_s(self, now_s: float) -> float | None:
        """Of its requests (eq. 1); None when it has no work."""
        ...


T = TypeVar("T", bound=Turnable)


def next_turn(instances: Iterable[T], now_s: float) -> T | None:
    """The instance with the least headroom, ties by id; None when none has work."""
    best: T | None = None
    best_key: tuple[float, str] | None = None
    for instance in instances:
        headroom = instance.least_headroom_s(now_s)
        if headroom is None:
            continue
        key = (headroom, instance.instance_id)
        if best_key is None or key < best_key:
            best, best_key = instance, key
    return best
