"""Which weights are on the device: the token-level auto-scaling of Aegaeon §5, by headroom.

Instances with work may be more than the device has room for. The instance whose next token is due
last loses its weights and keeps its KV cache; the one whose token is due first gets its weights
back. While one computes the next is copied, and tokens that were computed before they are due cover
the time without weights. Weights come in parts, so that who is due before all others waits for the
part under way and for others to leave, and go as far as others need their room. Among those on the
device turns go to the least headroom. Before: the node core, after each event unless a swap is
under way. After: `Engine.swap`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import InstanceId
from mesh.domain.steps import part_bytes
from mesh.policy.rules.headroom import Headroom
from mesh.policy.rules.turns import TurnRule

EQUAL = 1e-9
"""Shares of parts that differ by less differ by rounding."""
BEHIND_S = 1e9
"""Best effort is due so long after it came: behind all deadlines, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one instance of a node."""

    instance_id: InstanceId
    weights_bytes: int
    share: float
    """The share of them that is on the device: it computes with all of them alone."""
    due_s: float
    """When the instance's next token is due; infinite where it has nothing to compute."""
    may_go: bool = True
    """It does not compute now."""

    @property
    def here_bytes(self) -> int:
        """What of them is on the device."""
        return part_bytes(self.weights_bytes, self.share)


class Swap(NamedTuple):
    """Weights of an instance that go off the device or come to it."""

    instance_id: InstanceId
    share: float
    """The share of them that is on the device then."""


@runtime_checkable
class SwapRule(TurnRule, Protocol):
    """A turn rule that also says which weights are on the device."""

    def swap(self, weights: Sequence[Weights], free_bytes: int) -> Swap | None:
        """Whose weights move now, and which share of them is on the device then. `free_bytes` is
        what the pool has beside those on the device; below 0 some go, as soon as they may.
        Asked when no weights are on their way. Ties go to the lesser id.
        """
        ...


@dataclass(frozen=True)
class Swapping(Headroom):
    """Turns go as by `Headroom`, among those on the device."""

    parts: int = 1
    """In so many swaps the weights of an instance come. A node whose engine can only move all of
    them at once has 1, and so has one of an earlier version.
    """
    name: ClassVar[str] = "swap"

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise InvalidInput(f"weights come in 1 part or more, not in {self.parts}")

    def swap(self, weights: Sequence[Weights], free_bytes: int) -> Swap | None:
        """The instance that is out and due first comes in, a part at a time; what has no room takes
        that of those that are due later than it, the last of them first, if they have enough
        together for all of it.
        """
        here = [each for each in weights if each.share > 0.0 and each.may_go]
        here.sort(key=_due, reverse=True)
        if free_bytes < 0:
            return self._without(here[0], -free_bytes) if here else None
        out = [each for each in weights if each.share < 1.0 and each.due_s < inf]
        if not out:
            return None
        first = min(out, key=_due)
        share = min((floor(first.share * self.parts + EQUAL) + 1) / self.parts, 1.0)
        if free_bytes >= part_bytes(first.weights_bytes, share) - first.here_bytes:
            return Swap(first.instance_id, share)
        later = [each for each in here if _due(each) > _due(first)]
        lacking_bytes = first.weights_bytes - first.here_bytes - free_bytes
        if sum(each.here_bytes for each in later) < lacking_bytes:
            return None
        return self._without(later[0], lacking_bytes)

    def _without(self, each: Weights, lacking_bytes: int) -> Swap:
        """As many of its parts go as make so much room."""
        left = max(each.here_bytes - lacking_bytes, 0) / max(each.weights_bytes, 1)
        return Swap(each.instance_id, floor(left * self.parts + EQUAL) / self.parts)


def wanted(rule: SwapRule, weights: Sequence[Weights], free_bytes: int) -> Swap | None:
    """What the rule answers; None also where nothing comes of that: it names nobody of these, no
    share, or the one that is there.
    """
    found = rule.swap(weights, free_bytes)
    if found is None or not 0.0 <= found.share <= 1.0:
        return None
    there = {each.instance_id: each.share for each in weights}
    return found if there.get(found.instance_id, found.share) != found.share else None


def _due(each: Weights) -> tuple[float, InstanceId]:
    """The order in which weights come; they go in the reverse of it."""
    return each.due_s, each.instance_id


SWAPPING = Swapping(parts=8)
WHOLE = Swapping()
"""The same by whole weights."""


def by_parts(rule: TurnRule) -> bool:
    """Whether weights come by parts. An engine that can do that resizes the KV cache of their
    instance meanwhile.
    """
    return isinstance(rule, Swapping) and rule.parts > 1


def by_whole(rule: TurnRule) -> TurnRule:
    """The rule, as a node follows it whose engine moves whole weights alone."""
    return replace(rule, parts=1) if isinstance(rule, Swapping) else rule
