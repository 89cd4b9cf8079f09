"""What of a model's config.json decides its graph: sizes, rotary embedding, biases, norms.

`read_architecture` refuses what the graph builder cannot build, before any weight is read. Before
it comes the store's folder, after it `weights` (which tensors there must be) and `graph`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel

SUPPORTED_KINDS = ("llama", "qwen2", "qwen3")
SUPPORTED_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding: base frequency and, where the context was stretched, how."""

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192
    """The last three are llama3's; `factor` is linear's and llama3's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A dense decoder: RMS norms, rotary grouped-query attention, a gated SiLU MLP."""

    kind: str
    layers: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_size: int
    vocabulary_tokens: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read_architecture(model_path: Path) -> Architecture:
    """The architecture of the model in this store folder.

    Raises TornModel when config.json cannot be read or lacks a field, UnsupportedModel when it asks
    for something that the graph does not have.
    """
    path = model_path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TornModel(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise TornModel(f"{path} holds no JSON object")
    return parse_architecture(config)


def parse_architecture(config: Mapping[str, Any]) -> Architecture:
    """The same from the parsed config. Raises as `read_architecture` does."""
    kind = str(config.get("model_type", "missing"))
    if kind not in SUPPORTED_KINDS:
        raise _unsupported(f"model_type {kind!r}", f"supported: {', '.join(SUPPORTED_KINDS)}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(f"hidden_act {activation!r}", "supported: silu")
    if config.get("use_sliding_window"):
        raise _unsupported("use_sliding_window", "supported: full attention in every layer")
    try:
        heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        attention_bias = bool(config.get("attention_bias", kind == "qwen2"))
        return Architecture(
            kind=kind,
            layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            attention_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden_size // heads),
            vocabulary_tokens=int(config["vocab_size"]),
            norm_epsilon=float(config["rms_norm_eps"]),
            rope=_parse_rope(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or kind == "qwen2",
            output_bias=attention_bias and kind != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )
    except KeyError as error:
        raise TornModel(f"config.json has no field {error}") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise TornModel(f"config.json has a field of a wrong kind: {error}") from error


def _parse_rope(config: Mapping[str, Any]) -> Rope:
    """`rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which holds both."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = float(config.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
    name = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if name == "default":
        return Rope(theta=theta)
    if name == "linear":
        return Rope(theta=theta, scaling=name, factor=float(scaling["factor"]))
    if name == "llama3":
        return Rope(
            theta=theta,
            scaling=name,
            factor=float(scaling["factor"]),
            low_frequency_factor=float(scaling["low_freq_factor"]),
            high_frequency_factor=float(scaling["high_freq_factor"]),
            original_context_tokens=int(scaling["original_max_position_embeddings"]),
        )
    raise _unsupported(f"rope_scaling {name!r}", f"supported: {', '.join(SUPPORTED_ROPE)}")


def _unsupported(what: str, hint: str) -> UnsupportedModel:
    return UnsupportedModel(f"the OpenVINO engine does not run {what}", hint=hint)
