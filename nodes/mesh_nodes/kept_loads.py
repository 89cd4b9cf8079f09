"""What loads on this node have taken, kept beyond its end, and what it tells its cell of them.

Owns one small file under the node's home for each kind of node that has been there, by its
fingerprint, which has the engine's version in it. A torn or missing file is as good as none: loads
to come will say it again. Before: the lanes of loads, and `load_probe` where nothing is known.
After: the node's hello.
"""

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.compute.load_times import LOADS_KEPT, PRIORS, fitted
from mesh.domain.steps import LoadedInstance, LoadRate, LoadTier
from mesh_nodes.kept_json import keep_json

FOLDER = "load-times"

log = logging.getLogger(__name__)

Load = tuple[int, float]
"""Weights and seconds."""


class KeptLoads:
    """`note` and `rates` are for any thread."""

    def __init__(self, home: Path, fingerprint: str) -> None:
        self._path = home / FOLDER / f"{fingerprint.replace('/', '_')}.json"
        self._loads, self._measured = _read(self._path)
        self._noting = threading.Lock()

    def __bool__(self) -> bool:
        """Whether a load of what the store has is known."""
        return LoadTier.DISK in self._loads or LoadTier.PREPARED in self._loads

    def note_measured(self, rates: Mapping[LoadTier, LoadRate]) -> None:
        """What loads should take, by measurements before there has been any."""
        self._measured = {**self._measured, **rates}
        self._write()

    def note(self, loaded: LoadedInstance) -> None:
        """A load has ended well."""
        if loaded.elapsed_s <= 0.0 or loaded.footprint.weights_bytes <= 0:
            return
        load = (loaded.footprint.weights_bytes, loaded.elapsed_s)
        with self._noting:
            before = self._loads.get(loaded.tier, ())
            self._loads = {**self._loads, loaded.tier: (*before, load)[-LOADS_KEPT:]}
            self._write()

    def rates(self) -> tuple[tuple[LoadTier, LoadRate], ...]:
        """Of each tier that anything is known of."""
        loads, found = self._loads, []
        for tier in LoadTier:
            measured = self._measured.get(tier)
            if tier in loads:
                found.append((tier, fitted(loads[tier], measured or PRIORS[tier])))
            elif measured is not None:
                found.append((tier, measured))
        return tuple(found)

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


def _load(weights_bytes: int, seconds: float) -> Load:
    if not (weights_bytes > 0 and seconds > 0.0):
        raise ValueError(f"a load of {weights_bytes} bytes in {seconds} s")
    return int(weights_bytes), float(seconds)


def _rate(fixed_s: float, bytes_per_s: float) -> LoadRate:
    if not (fixed_s >= 0.0 and bytes_per_s > 0.0):
        raise ValueError(f"loads of {fixed_s} s and more at {bytes_per_s} B/s")
    return LoadRate(fixed_s=float(fixed_s), bytes_per_s=float(bytes_per_s))
