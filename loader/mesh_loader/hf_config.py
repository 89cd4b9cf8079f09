"""Brings a Hugging Face config.json into the one form that engines read.

transformers has moved keys over the years (`rope_parameters`, `dtype`, `type` for `rope_type`) and
leaves out what equals its defaults; here every key that an engine needs is present and in its
classic place. Unknown keys stay.
"""

from collections.abc import Mapping
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh_loader.architectures import Shape, check_rotary, number_in, with_defaults

ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope")


def normalised(config: Mapping[str, Any], shape: Shape, name: str) -> dict[str, Any]:
    """The config with all keys filled in; `name` is the file for error messages.

    Raises UnsupportedModel for a rotary scaling that transformers does not name either.
    """
    config = with_defaults(config)
    rope, local = _rope(config, name)
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    check_rotary(shape, partial, name)
    kind = rope.get("rope_type", "default")
    given = rope.pop("rope_theta", None)
    theta = number_in(config if given is None else {"rope_theta": given}, "rope_theta", name)
    if shape.architecture == "phi3" and kind in ("su", "yarn") and "short_factor" in rope:
        kind = rope["rope_type"] = "longrope"  # as its early configs name it
    if kind not in (*ROPE_TYPES, "default"):
        raise UnsupportedModel(f"{name}: rotary scaling {kind!r} is not supported")
    if kind in ("llama3", "yarn", "longrope"):
        original = config.get("original_max_position_embeddings")
        # The key outside comes first, as in transformers.
        inside = rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = (
            original or inside or config.get("max_position_embeddings")
        )
    factors = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    for key in (*(("factor",) if kind in ("linear", "dynamic", "llama3") else ()), *factors):
        number_in(rope, key, name)
    if shape.architecture == "gemma3_text":
        local = number_in({"rope_local_base_freq": local}, "rope_local_base_freq", name)
    filled = {key: value for key, value in config.items() if key != "rope_parameters"}
    if shape.experts:
        filled["num_experts"] = shape.experts
    if partial != 1.0:
        filled["partial_rotary_factor"] = partial
    else:
        filled.pop("partial_rotary_factor", None)
    if local is not None:
        filled["rope_local_base_freq"] = local
    return {
        **filled,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": config.get("hidden_activation") or config.get("hidden_act"),
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else rope,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "torch_dtype": config.get("torch_dtype", config.get("dtype")),
    }


def _rope(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], float | None]:
    """The rotary scaling, and the base frequency of layers with a window where it is another.

    `rope_scaling` comes before `rope_parameters`, as in transformers.
    """
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    local = config.get("rope_local_base_freq")
    for given in (parameters, scaling):
        if not isinstance(given, dict):
            raise TornModel(f"{name}: the rotary scaling should be an object, it is {given!r}")
    if "full_attention" in parameters or "sliding_attention" in parameters:
        sliding = _typed(parameters.get("sliding_attention") or {}, name)
        if sliding.get("rope_type", "default") != "default":
            raise UnsupportedModel(
                f"{name}: rotary scaling {sliding['rope_type']!r} of layers with a window is not "
                "supported"
            )
        local = sliding.get("rope_theta", local)
        full = _typed(parameters.get("full_attention") or {}, name)
        return {**full, **_typed(scaling, name)}, local
    return _typed(scaling or parameters, name), local


def _typed(given: Any, name: str) -> dict[str, Any]:
    """A copy, in which the type is called `rope_type`."""
    if not isinstance(given, dict):
        raise TornModel(f"{name}: the rotary scaling should be an object, it is {given!r}")
    rope = dict(given)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope
