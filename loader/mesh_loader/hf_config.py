"""Brings a Hugging Face config.json into the one form that engines read.

transformers has moved keys over the years (`rope_parameters`, `dtype`, `type` for `rope_type`) and
leaves out what equals its defaults; here every key that an engine needs is present and in its
classic place. Unknown keys stay.
"""

from collections.abc import Mapping
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh_loader.architectures import Shape, check_rotary

ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")


def normalised(config: Mapping[str, Any], shape: Shape, name: str) -> dict[str, Any]:
    """The config with all keys filled in; `name` is the file for error messages.

    Raises UnsupportedModel for a rotary scaling that transformers does not name either.
    """
    rope, local = _rope(config, name)
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    check_rotary(shape, partial, name)
    kind = rope.get("rope_type", "default")
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise TornModel(f"{name}: rope_theta should be a positive number, it is {theta!r}")
    if kind not in (*ROPE_TYPES, "default"):
        raise UnsupportedModel(f"{name}: rotary scaling {kind!r} is not supported")
    filled = {key: value for key, value in config.items() if key != "rope_parameters"}
    if shape.experts:
        filled["num_experts"] = shape.experts
    if partial != 1.0:
        filled["partial_rotary_factor"] = partial
    if local is not None:
        filled["rope_local_base_freq"] = local
    return {
        **filled,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": config.get("hidden_activation") or config.get("hidden_act", "silu"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else rope,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "torch_dtype": config.get("torch_dtype", config.get("dtype")),
    }


def _rope(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], float | None]:
    """The rotary scaling, and the base frequency of layers with a window where it is another."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = config.get("rope_local_base_freq")
    if isinstance(given, dict) and "full_attention" in given:
        local = (given.get("sliding_attention") or {}).get("rope_theta", local)
        given = given["full_attention"]
    if not isinstance(given, dict):
        raise TornModel(f"{name}: the rotary scaling should be an object, it is {given!r}")
    rope = dict(given)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope, local
