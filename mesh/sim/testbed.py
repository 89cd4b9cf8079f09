"""The measured tables that ship with mesh, as models, footprints and profiles of virtual nodes.

`llm_mesh_testbed.json` holds what the authors of LLM-Mesh measured of three models on a CPU and a
GPU, with its source. A prefill was measured by its length alone and a decode for batches that fit
the memory; what a `Grid` wants beyond that is derived here.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mesh.domain.errors import NotFound
from mesh.domain.ids import ModelId
from mesh.domain.model import Footprint, ModelFormat, ModelInfo
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind
from mesh.sim.costs import ModelCosts

HARDWARE = {DeviceKind.CPU: "Xeon 6462C", DeviceKind.GPU: "A100-80GB"}
CORES = {DeviceKind.CPU: 32, DeviceKind.GPU: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model of the testbed, and what it costs on each of its devices."""

    info: ModelInfo
    costs: Mapping[DeviceKind, ModelCosts]


@cache
def known_models() -> dict[str, KnownModel]:
    """By name."""
    text = resources.files("mesh.sim").joinpath("llm_mesh_testbed.json").read_text("utf-8")
    return {name: _known(name, raw) for name, raw in json.loads(text)["models"].items()}


def known_model(name: str) -> KnownModel:
    """Raises NotFound when the testbed had no such model."""
    models = known_models()
    if name not in models:
        raise NotFound(f"there is no model {name!r}", hint=f"models: {', '.join(sorted(models))}")
    return models[name]


def engine_name(device: DeviceKind) -> str:
    """Footprints are kept by engine, and blocks differ between the two."""
    return f"cost-model-{device}"


def _known(name: str, raw: Mapping[str, Any]) -> KnownModel:
    shape = {key: raw[key] for key in _SHAPE}
    info = ModelInfo(
        model_id=ModelId(f"testbed-{name}"),
        source=f"testbed://{name}",
        format=ModelFormat.SAFETENSORS,
        architecture="llama",
        disk_bytes=raw["weights_bytes"],
        stop_token_ids=(2,),
        **shape,
    )
    measured = {DeviceKind(device): table for device, table in raw["hardware"].items()}
    return KnownModel(
        info=info,
        costs={device: _costs(info, device, table) for device, table in measured.items()},
    )


_SHAPE = (
    "layers",
    "hidden_size",
    "attention_heads",
    "kv_heads",
    "head_size",
    "vocabulary_tokens",
    "parameters",
    "context_tokens_max",
)


def _costs(info: ModelInfo, device: DeviceKind, table: Mapping[str, Any]) -> ModelCosts:
    kv_bytes, block_tokens = info.kv_bytes_per_token(), table["block_tokens"]
    return ModelCosts(
        profile=Profile(
            model_id=info.model_id,
            device=device,
            fingerprint=f"testbed/{device}",
            hardware=HARDWARE[device],
            cores=CORES[device],
            parameters=info.parameters,
            weights_bytes=info.disk_bytes,
            kv_bytes_per_token=kv_bytes,
            prefill=prefill_grid(table["prefill"]["tokens"], table["prefill"]["seconds"]),
            decode=decode_grid(table["decode"]),
        ),
        footprint=Footprint(
            weights_bytes=info.disk_bytes,
            kv_block_bytes=kv_bytes * block_tokens,
            block_tokens=block_tokens,
        ),
    )


def prefill_grid(tokens: list[int], seconds: list[float]) -> Grid:
    """From the times of whole prompts. A chunk with tokens before it takes as long as it lengthens
    the whole prompt's prefill by, so that the chunks of a prompt come to what it took as a whole;
    but no less than the same chunk at the start.
    """
    last = tokens[-1]

    def chunk_s(size: int, past: int) -> float:
        whole = min(past + size, last)
        return max(_at(tokens, seconds, whole) - _at(tokens, seconds, whole - size), 0.0)

    alone = dict(zip(tokens, seconds, strict=True))
    columns = (0, *(size for size in tokens if size >= 256))
    rows = tuple(
        tuple(max(alone[size], chunk_s(size, past)) for past in columns) for size in tokens
    )
    return Grid(rows=tuple(tokens), columns=columns, seconds=rows)


def decode_grid(measured: list[dict[str, Any]]) -> Grid:
    """From one row of batches for each context length; larger batches than were measured take
    longer in proportion, as LLM-Mesh reads its tables (§5.2).
    """
    batches = sorted({batch for row in measured for batch in row["batch"]})
    seconds = tuple(
        tuple(_at(row["batch"], row["seconds"], batch) for row in measured) for batch in batches
    )
    columns = tuple(row["context_tokens"] for row in measured)
    return Grid(rows=tuple(batches), columns=columns, seconds=seconds)


def _at(points: list[int], seconds: list[float], size: int) -> float:
    """Linear between the points, in proportion beyond the last, 0 for a size of 0."""
    if size <= 0:
        return 0.0
    high = bisect_right(points, size)
    if high == 0:
        return seconds[0]
    if high == len(points):
        return seconds[-1] * size / points[-1]
    share = (size - points[high - 1]) / (points[high] - points[high - 1])
    return seconds[high - 1] + (seconds[high] - seconds[high - 1]) * share
