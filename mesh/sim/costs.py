"""What things cost on a virtual node, in seconds: iterations by a profile, and memory operations.

A profile is what a device was measured to take; `factor` makes a node slower (or quicker) than what
the controller knows of it, and a `Pace` lets it be so for a while. Loads and unloads, and resizes
that map memory, are straight lines: a constant and a rate. Resizes that copy are as LLM-Mesh
measured them (§6.2, Figure 8).
"""

import random
from collections.abc import Mapping
from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from mesh.domain.model import Footprint
from mesh.domain.profile import Profile
from mesh.domain.steps import LoadRate
from mesh.domain.values import dataclass


class Resizing(StrEnum):
    """How an engine resizes a KV cache."""

    MAPS = "maps"
    """It maps pages, or gives them back; no block moves."""
    COPIES = "copies"
    """It makes a new cache and copies the blocks in use, as LLM-Mesh's engines do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much longer iterations take at a time than `NodeCosts.factor` says, as on a machine whose
    neighbours come and go: one factor for each `window_s` from time 0 on; after the last one it
    begins anew. Without factors the pace is even.
    """

    window_s: float = 1.0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(value > 0 for value in (self.window_s, *self.factors)):
            raise ValueError("a pace needs a window and factors above 0")

    def at(self, now_s: float) -> float:
        if not self.factors:
            return 1.0
        return self.factors[int(now_s / self.window_s) % len(self.factors)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """What single iterations take more, or less, than all else says, drawn at random: one of these
    seconds each, and one of these shares of the engine's part. Without any, none does.
    """

    decode_s: tuple[float, ...] = ()
    prefill_s: tuple[float, ...] = ()
    """The seconds for iterations with prompts among them."""
    decode_shares: tuple[float, ...] = ()
    prefill_shares: tuple[float, ...] = ()
    seed: int = 0
    """Beside that of the node (`NodePlan.seed`)."""

    def is_none(self) -> bool:
        return not (self.decode_s or self.prefill_s or self.decode_shares or self.prefill_shares)

    def drawn_s(self, engine_s: float, drawn: random.Random, *, prefill: bool) -> float:
        seconds = self.prefill_s if prefill else self.decode_s
        shares = self.prefill_shares if prefill else self.decode_shares
        if not seconds and not shares:
            return 0.0
        more_s = drawn.choice(seconds) if seconds else 0.0
        return more_s + engine_s * drawn.choice(shares) if shares else more_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCosts:
    """The costs of one node, whatever the model."""

    factor: float = 1.0
    """By which every iteration takes longer than its profile says."""
    prefill_factor: float = 1.0
    """By which those with prompt tokens among them take longer still."""
    overhead_s: float = 0.0
    """What every iteration takes from turn to turn beside the engine's part."""
    load_slowdown: float = 1.0
    """By which an iteration takes longer that begins beside a load."""
    priming_s: float = 0.0
    """What every size takes that a new instance computes once, so that the engine builds its
    kernels.
    """
    pace: Pace = field(default_factory=Pace)
    jitter: Jitter = field(default_factory=Jitter)
    load_s: float = 0.3
    """What every load takes beside its weights."""
    load_stretch: float = 1.0
    """By which a load takes longer beside which its node computes all along."""
    load_bytes_per_s: float = 13.5e9
    swap_s: float = 0.03
    """What it takes all weights of an instance to leave the device, and a part of them so much
    less: an H100 let 16 GB go in 26 to 42 ms, by 1 as by 16 parts (docs/gpu.md).
    """
    swap_part_s: float = 0.0005
    """What each part takes beside that, or beside its copy: 0.2 to 0.6 ms there."""
    resize: Resizing = Resizing.MAPS
    resize_s: float = 0.002
    """What every resize takes that maps."""
    resize_bytes_per_s: float = 30e9
    """At which memory is mapped or given back."""
    grow_copy_bytes_per_s: float = 64e9 / 1.9
    """The rate of growing by a copy, by the new size: LLM-Mesh grew a cache from 32 to 64 GB in 1.9
    s.
    """
    shrink_copy_bytes_per_s: float = 16e9 / 0.3
    """The rate of shrinking by a copy, by the new size: LLM-Mesh shrank a cache from 32 to 16 GB in
    0.3 s.
    """
    unload_s: float = 0.05

    def __post_init__(self) -> None:
        if not all(value > 0 for value in (self.prefill_factor, self.load_slowdown)):
            raise ValueError("prefill_factor and load_slowdown must be above 0")
        if not self.load_stretch >= 1.0:
            raise ValueError("load_stretch must be 1 or more")
        if not all(value >= 0 for value in (self.overhead_s, self.priming_s)):
            raise ValueError("overhead_s and priming_s must be 0 or more")

    @property
    def swap_rate(self) -> LoadRate:
        """What a node tells of swaps: the fixed part is what weights take to leave."""
        return LoadRate(fixed_s=self.swap_s, bytes_per_s=self.load_bytes_per_s)

    def swap_time_s(self, weights_bytes: int, more: float) -> float:
        """Seconds in which such a share of the weights comes to the device, or, below 0, leaves."""
        come_s, gone_s = weights_bytes / self.load_bytes_per_s * more, -self.swap_s * more
        return self.swap_part_s + max(come_s, gone_s)

    def load_time_s(self, weights_bytes: int) -> float:
        return self.load_s + weights_bytes / self.load_bytes_per_s

    def resize_time_s(self, old_bytes: int, new_bytes: int) -> float:
        if self.resize is Resizing.MAPS:
            return self.resize_s + abs(new_bytes - old_bytes) / self.resize_bytes_per_s
        if new_bytes == old_bytes:
            return 0.0
        grows = new_bytes > old_bytes
        return new_bytes / (self.grow_copy_bytes_per_s if grows else self.shrink_copy_bytes_per_s)


@dataclass(frozen=True, slots=True)
class GivenCosts:
    """Some costs of a node by their names in `NodeCosts`, in place of what its device's are."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def onto(self, known: NodeCosts) -> NodeCosts:
        return replace(known, **self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """The costs of one model on one kind of node."""

    profile: Profile
    footprint: Footprint
    """With what the engine of an instance takes beside weights and KV cache."""
