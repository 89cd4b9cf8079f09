"""What things cost on a virtual node, in seconds: iterations by a profile, and memory operations.

A profile is what a device was measured to take; `factor` makes a node slower (or quicker) than what
the controller knows of it. Loads, resizes and unloads are straight lines: a constant and a rate.
"""

from dataclasses import dataclass

from mesh.domain.model import Footprint
from mesh.domain.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCosts:
    """Of one node, whatever the model."""

    factor: float = 1.0
    """By which every iteration takes longer than its profile says."""
    load_s: float = 0.3
    """Of every load: all but its weights."""
    load_bytes_per_s: float = 13.5e9
    resize_s: float = 0.002
    """Of every resize of a KV cache. Engines that map memory copy nothing."""
    resize_bytes_per_s: float = 30e9
    """At which memory is mapped or given back."""
    unload_s: float = 0.05

    def load_time_s(self, weights_bytes: int) -> float:
        return self.load_s + weights_bytes / self.load_bytes_per_s

    def resize_time_s(self, changed_bytes: int) -> float:
        return self.resize_s + changed_bytes / self.resize_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Of one model on one kind of node."""

    profile: Profile
    footprint: Footprint
