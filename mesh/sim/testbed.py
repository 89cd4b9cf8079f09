"""The measured tables that ship with mesh, as models, footprints and profiles of virtual nodes.

`llm_mesh_testbed.json` holds what the authors of LLM-Mesh measured of four models on CPUs of 32, 16
and 8 cores and on a GPU, and a derived table of an H200, with their sources. A prefill was measured
by its length alone and a decode for batches that fit the memory; what a `Grid` wants beyond that is
derived here.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from mesh.domain.energy import Power, parse_watts
from mesh.domain.errors import NotFound
from mesh.domain.ids import ModelId
from mesh.domain.model import Footprint, ModelFormat, ModelInfo
from mesh.domain.profile import Grid, Profile
from mesh.domain.reasons import DeviceKind
from mesh.domain.values import dataclass
from mesh.sim.costs import ModelCosts

DEFAULT = {DeviceKind.CPU: "xeon-32", DeviceKind.GPU: "a100-80gb"}
"""Hardware of nodes that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What tables were measured on."""

    key: str
    """As scenarios call it."""
    device: DeviceKind
    name: str
    cores: int
    """0 for a GPU."""
    block_tokens: int
    """The tokens of a KV block, as the testbed's engine has them on this hardware."""
    power: Power | None
    """`None` where nobody has told what it draws."""

    @property
    def fingerprint(self) -> str:
        return f"testbed/{self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model of the testbed, and what it costs on the hardware that it was measured on."""

    info: ModelInfo
    costs: Mapping[str, ModelCosts]
    """By `Hardware.key`."""


@cache
def known_hardware() -> dict[str, Hardware]:
    """By key."""
    return {
        key: Hardware(
            key=key,
            device=DeviceKind(raw["device"]),
            name=raw["name"],
            cores=raw["cores"],
            block_tokens=raw["block_tokens"],
            power=parse_watts(raw["watts"]) if "watts" in raw else None,
        )
        for key, raw in _tables()["hardware"].items()
    }


@cache
def known_models() -> dict[str, KnownModel]:
    """By name."""
    return {name: _read_model(name, raw) for name, raw in _tables()["models"].items()}


def known_model(name: str) -> KnownModel:
    """Raises NotFound when the testbed had no such model."""
    models = known_models()
    if name not in models:
        raise NotFound(f"there is no model {name!r}", hint=f"models: {', '.join(sorted(models))}")
    return models[name]


def engine_name(device: DeviceKind) -> str:
    """Footprints are kept by engine, and blocks differ between the two."""
    return f"cost-model-{device}"


def _tables() -> dict[str, Any]:
    text = resources.files("mesh.sim").joinpath("llm_mesh_testbed.json").read_text("utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables


def _read_model(name: str, raw: Mapping[str, Any]) -> KnownModel:
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
    hardware = known_hardware()
    measured = raw["hardware"].items()
    return KnownModel(
        info=info, costs={key: _costs(info, hardware[key], table) for key, table in measured}
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


def _costs(info: ModelInfo, hardware: Hardware, table: Mapping[str, Any]) -> ModelCosts:
    kv_bytes, block_tokens = info.kv_bytes_per_token(), hardware.block_tokens
    return ModelCosts(
        profile=Profile(
            model_id=info.model_id,
            device=hardware.device,
            fingerprint=hardware.fingerprint,
            hardware=hardware.name,
            cores=hardware.cores,
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
