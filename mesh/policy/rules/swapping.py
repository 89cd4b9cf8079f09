"""Which weights are on the device: the token-level auto-scaling of Aegaeon §5, by headroom.

Instances with work may be more than the device has room for. The instance whose next token is due
last loses its weights and keeps its KV cache; the one whose token is due first gets its weights
back. While one computes the next is copied, and tokens that were computed before they are due cover
the time without weights. Among those on the device turns go to the least headroom. Before: the node
core, after each event unless a swap is under way. After: `Engine.swap`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol, runtime_checkable

from mesh.domain.ids import InstanceId
from mesh.policy.rules.headroom import Headroom
from mesh.policy.rules.turns import TurnRule

BEHIND_S = 1e9
"""Best effort is due so long after it came: behind all deadlines, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one instance of a node."""

    instance_id: InstanceId
    weights_bytes: int
    resident: bool
    """They are on the device."""
    due_s: float
    """When the instance's next token is due; infinite where it has nothing to compute."""
    may_go: bool = True
    """It does not compute now."""


@runtime_checkable
class SwapRule(TurnRule, Protocol):
    """A turn rule that also says which weights are on the device."""

    def swap(self, weights: Sequence[Weights], free_bytes: int) -> Weights | None:
        """Whose weights go to the other side now, off the device or onto it. `free_bytes` is what
        the pool has beside those on the device; below 0 some have to go, as soon as they may.
        Asked when no weights are on their way. Ties go to the lesser id.
        """
        ...


@dataclass(frozen=True)
class Swapping(Headroom):
    """Turns go as by `Headroom`, among those on the device."""

    name: ClassVar[str] = "swap"

    def swap(self, weights: Sequence[Weights], free_bytes: int) -> Weights | None:
        """The instance that is out and due first comes in; what has no room takes that of those
        that are due later than it, the last of them first, if they have enough together.
        """
        here = sorted(
            (each for each in weights if each.resident and each.may_go),
            key=lambda each: (-each.due_s, each.instance_id),
        )
        if free_bytes < 0:
            return here[0] if here else None
        out = [each for each in weights if not each.resident and each.due_s < inf]
        if not out:
            return None
        first = min(out, key=lambda each: (each.due_s, each.instance_id))
        later = [each for each in here if each.due_s > first.due_s]
        if free_bytes >= first.weights_bytes:
            return first
        enough = free_bytes + sum(each.weights_bytes for each in later) >= first.weights_bytes
        return later[0] if enough else None


SWAPPING = Swapping()
