"""What things cost on a virtual node, in seconds: iterations by a profile, and memory operations.

A profile is what a device was measured to take; `factor` makes a node slower (or quicker) than what
the controller knows of it. Loads and unloads, and resizes that map memory, are straight lines: a
constant and a rate. Resizes that copy are as LLM-Mesh measured them (§6.2, Figure 8).
"""

from dataclasses import dataclass
from enum import StrEnum

from mesh.domain.model import Footprint
from mesh.domain.profile import Profile


class Resizing(StrEnum):
    """How an engine resizes a KV cache."""

    MAPS = "maps"
    """It maps pages, or gives them back; no block moves."""
    COPIES = "copies"
    """It makes a new cache and copies the blocks in use, as LLM-Mesh's engines do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCosts:
    """Of one node, whatever the model."""

    factor: float = 1.0
    """By which every iteration takes longer than its profile says."""
    load_s: float = 0.3
    """Of every load: all but its weights."""
    load_bytes_per_s: float = 13.5e9
    resize: Resizing = Resizing.MAPS
    resize_s: float = 0.002
    """Of every resize that maps."""
    resize_bytes_per_s: float = 30e9
    """At which memory is mapped or given back."""
    grow_copy_bytes_per_s: float = 64e9 / 1.9
    """Of a copy's new size: LLM-Mesh grew a cache from 32 to 64 GB in 1.9 s."""
    shrink_copy_bytes_per_s: float = 16e9 / 0.3
    """Of a copy's new size: LLM-Mesh shrank one from 32 to 16 GB in 0.3 s."""
    unload_s: float = 0.05

    def load_time_s(self, weights_bytes: int) -> float:
        return self.load_s + weights_bytes / self.load_bytes_per_s

    def resize_time_s(self, old_bytes: int, new_bytes: int) -> float:
        if self.resize is Resizing.MAPS:
            return self.resize_s + abs(new_bytes - old_bytes) / self.resize_bytes_per_s
        if new_bytes == old_bytes:
            return 0.0
        grows = new_bytes > old_bytes
        return new_bytes / (self.grow_copy_bytes_per_s if grows else self.shrink_copy_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Of one model on one kind of node."""

    profile: Profile
    footprint: Footprint
