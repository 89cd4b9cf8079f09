"""What loads on this node have taken, kept beyond its end, and what it tells its cell of them.

Owns one small file under the node's home for each kind of node that has been there, by its
fingerprint, which has the engine's version in it. A torn or missing file is as good as none: loads
to come will say it again. Told is what loads take alone, whatever was computed beside those that
were seen. Before: the reports of loads, and `load_probe` where nothing is known. After: the node's
hello.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.compute.load_times import (
    LOADS_KEPT,
    PRIORS,
    fitted,
    learned_slowdown,
    slowdowns,
    stated_slowdown,
)
from mesh.domain.messages import InstanceLoaded
from mesh.domain.steps import LoadRate, LoadTier
from mesh_nodes.kept_json import keep_json

FOLDER = "load-times"
_FROM_STORE = frozenset({LoadTier.DISK, LoadTier.PREPARED, LoadTier.CACHED})

log = logging.getLogger(__name__)

Load = tuple[int, float, float]
"""Weights, seconds, and of these the share in which the node computed beside it."""


class KeptLoads:
    """`note` and `rates` are for any thread."""

    def __init__(self, home: Path, fingerprint: str, busy_load_factor: float = 1.0) -> None:
        """`busy_load_factor`: as the node states it."""
        self._stated_slowdown = stated_slowdown(busy_load_factor)
        self._path = home / FOLDER / f"{fingerprint.replace('/', '_')}.json"
        self._loads, self._measured = _read(self._path)
        self._noting = threading.Lock()

    def __bool__(self) -> bool:
        """Whether a load of what the store has is known."""
        return not self._loads.keys().isdisjoint(_FROM_STORE)

    def note_measured(self, rates: Mapping[LoadTier, LoadRate]) -> None:
        """What loads should take, by measurements before there has been any."""
        self._measured = {**self._measured, **rates}
        self._write()

    def note(self, loaded: InstanceLoaded) -> None:
        """A load has ended well."""
        if loaded.swapped or loaded.elapsed_s <= 0.0 or loaded.footprint.weights_bytes <= 0:
            return
        share = min(loaded.computed_s / loaded.elapsed_s, 1.0)
        load = (loaded.footprint.weights_bytes, loaded.elapsed_s, share)
        with self._noting:
            before = self._loads.get(loaded.tier, ())
            self._loads = {**self._loads, loaded.tier: (*before, load)[-LOADS_KEPT:]}
            self._write()

    def rates(self) -> tuple[tuple[LoadTier, LoadRate], ...]:
        """The load rate of each tier of which anything is known."""
        loads, found = self._loads, []
        slowdown = self._slowdown(loads)
        for tier in LoadTier:
            if tier in loads:
                alone = [(size, s / (1.0 + slowdown * share)) for size, s, share in loads[tier]]
                found.append((tier, fitted(alone, self._prior(tier))))
            elif tier in self._measured:
                found.append((tier, self._measured[tier]))
        return tuple(found)

    def _prior(self, tier: LoadTier) -> LoadRate:
        return self._measured.get(tier, PRIORS[tier])

    def _slowdown(self, loads: Mapping[LoadTier, Sequence[Load]]) -> float:
        """How much slower loads are while the node computes beside them, as its controller learns
        it.
        """
        if not self._stated_slowdown:
            return 0.0
        seen = [
            slowdown
            for tier, of_tier in loads.items()
            for slowdown in slowdowns(
                (seconds / self._prior(tier).load_s(size), share)
                for size, seconds, share in of_tier
            )
        ]
        return learned_slowdown(self._stated_slowdown, seen)

    def _write(self) -> None:
        content = {
            "measured": {
                tier: [rate.fixed_s, rate.bytes_per_s] for tier, rate in self._measured.items()
            },
            "loads": self._loads,
        }
        try:
            keep_json(self._path, content)
        except OSError as error:
            reason = error.strerror or error
            log.warning("load times are not kept in %s: %s", self._path.parent, reason)


def _read(path: Path) -> tuple[Mapping[LoadTier, tuple[Load, ...]], Mapping[LoadTier, LoadRate]]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        loads = {
            LoadTier(tier): tuple(_load(*load) for load in of_tier[-LOADS_KEPT:])
            for tier, of_tier in content["loads"].items()
            if of_tier
        }
        measured = {LoadTier(tier): _rate(*rate) for tier, rate in content["measured"].items()}
        return loads, measured
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("what %s says of earlier loads is not used: %s", path, error)
        return {}, {}


def _load(weights_bytes: int, seconds: float, beside_share: float = 0.0) -> Load:
    """Files of before say nothing of the last."""
    if not (weights_bytes > 0 and seconds > 0.0 and 0.0 <= beside_share <= 1.0):
        raise ValueError(f"a load of {weights_bytes} bytes in {seconds} s, {beside_share} beside")
    return int(weights_bytes), float(seconds), float(beside_share)


def _rate(fixed_s: float, bytes_per_s: float) -> LoadRate:
    if not (fixed_s >= 0.0 and bytes_per_s > 0.0):
        raise ValueError(f"loads of {fixed_s} s and more at {bytes_per_s} B/s")
    return LoadRate(fixed_s=float(fixed_s), bytes_per_s=float(bytes_per_s))
