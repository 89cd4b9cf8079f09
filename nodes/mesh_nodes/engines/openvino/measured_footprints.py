"""What the engine books instances at: estimates, corrected by what unloads have really freed.

Owns what was seen of each shape, and a small file of it that outlives the node; nodes that share a
state folder share it. A torn or missing file is as good as none. Before: `engine`, which unloads.
After: the footprints that it states; the rule itself is `mesh.memory.footprints`.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.domain.model import ComputePrecision, Footprint, KvPrecision, ModelInfo, WeightPrecision
from mesh.domain.units import format_bytes
from mesh.domain.values import replace
from mesh.memory.footprints import Seen, booked_bytes
from mesh_nodes.engines.openvino.footprint import (
    Reached,
    again_bytes,
    estimate,
    shared_bytes,
    unmet_bytes,
)
from mesh_nodes.kept_json import keep_json

SIZES_MIN = 8
"""Sizes of iterations that an instance has met before what it holds counts towards booking less."""


SHAPES_MAX = 1024
"""Footprints are remembered for this many shapes; those that were seen longest ago are forgotten.
"""


log = logging.getLogger(__name__)


class MeasuredFootprints:
    """`note` is for one thread at a time, `footprint` for any."""

    def __init__(
        self,
        *,
        weights: WeightPrecision,
        kv: KvPrecision,
        compute: ComputePrecision = ComputePrecision.F32,
        repacks: bool = False,
        path: Path | None,
    ) -> None:
        """Without a path nothing outlives the engine; `estimate` says what the others are."""
        self._compute = compute
        self._weights = weights
        self._repacks = repacks
        self._kv = kv
        self._path = path
        self._seen: Mapping[str, Seen] = {} if path is None else _read(path)

    def footprint(self, model: ModelInfo) -> Footprint:
        """What an instance of the model is booked at from now on, rope tables apart."""
        first = estimate(
            model,
            weights=self._weights,
            kv=self._kv,
            compute=self._compute,
            repacks=self._repacks,
        )
        booked = booked_bytes(first.weights_bytes, self._seen.get(model.shape))
        return replace(first, weights_bytes=booked, shared_bytes=shared_bytes(model, booked))

    def note(self, model: ModelInfo, freed_bytes: int, reached: Reached) -> None:
        """An instance has gone, in a quiet moment, and so much of the process's memory with it, the
        KV cache and rope tables apart. What it had not met of iterations is reckoned on top.
        """
        held_bytes = freed_bytes + unmet_bytes(model, reached)
        if self._repacks and not reached.repacked:
            held_bytes += again_bytes(model, model.weights or self._weights)
        whole = len(reached.sizes) >= SIZES_MIN
        merged = _merged({} if self._path is None else _read(self._path), self._seen)
        seen = merged.pop(model.shape, Seen()).after(held_bytes, whole=whole)
        self._seen = dict(list({**merged, model.shape: seen}.items())[-SHAPES_MAX:])
        booked = format_bytes(self.footprint(model).weights_bytes)
        freed = format_bytes(max(freed_bytes, 0))
        log.info("%s: unloaded, %s freed; its shape is booked at %s", model.model_id, freed, booked)
        if self._path is not None:
            _write(self._path, self._seen)


def _merged(kept: Mapping[str, Seen], own: Mapping[str, Seen]) -> dict[str, Seen]:
    """What other nodes have seen of a shape counts as much."""
    merged = dict(kept)
    for shape, seen in own.items():
        other = merged.pop(shape, seen)
        merged[shape] = Seen(
            most_bytes=max(seen.most_bytes, other.most_bytes), lives=max(seen.lives, other.lives)
        )
    return merged


def _write(path: Path, seen: Mapping[str, Seen]) -> None:
    content = {shape: [found.most_bytes, found.lives] for shape, found in seen.items()}
    try:
        keep_json(path, content)
    except OSError as error:
        log.warning("footprints are not kept in %s: %s", path, error.strerror or error)


def _read(path: Path) -> Mapping[str, Seen]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {shape: _checked_seen(*found) for shape, found in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("what %s says of earlier instances is not used: %s", path, error)
        return {}


def _checked_seen(most_bytes: int, lives: int) -> Seen:
    if not (int(most_bytes) >= 0 and int(lives) >= 0):
        raise ValueError(f"{most_bytes} bytes in {lives} lives")
    return Seen(most_bytes=int(most_bytes), lives=int(lives))
