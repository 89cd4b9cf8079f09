"""What of a model's config.json decides its graph: sizes, rotary embedding, windows, experts.

`read_architecture` refuses what the graph builder cannot build, before any weight is read. Before
it comes the store's folder, after it `weights` (which tensors there must be) and `graph`.
"""

from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import ENCODERS, Task
from mesh.domain.values import dataclass
from mesh_loader.architectures import (
    GEMMAS,
    MIXTURES,
    NATIVE_ARCHITECTURES,
    number_in,
    size_in,
    sparse_layers,
    with_defaults,
)
from mesh_loader.config_keys import ONLY_TASK, PREFIX, check_config
from mesh_loader.encoders import encoder_shape, positions_before
from mesh_loader.model_info import read_json
from mesh_loader.quantisation import quantisation_of

_NAME = "config.json"
SUPPORTED_KINDS = NATIVE_ARCHITECTURES
SUPPORTED_ROPE = ("default", "linear", "llama3", "longrope")
SILU, GELU_TANH, GELU, RELU = "silu", "gelu_tanh", "gelu", "relu"
_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
_OF_ENCODERS = {**_ACTIVATIONS, "gelu": GELU, "gelu_new": GELU_TANH, "relu": RELU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding: base frequency and, where the context was stretched, how."""

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192
    """The last three are llama3's; `factor` is linear's, too, and the last longrope's."""
    short_factors: tuple[float, ...] = ()
    """longrope's divisors of each frequency, for contexts up to the original."""
    table_factor: float = 1.0
    """longrope's, of cosines and sines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture in place of the MLP of some layers."""

    count: int
    chosen: int
    """This many experts compute each token."""
    intermediate_size: int
    """The inner width of each expert."""
    normalised: bool
    """Whether the shares of those chosen sum to one."""
    shared_intermediate_size: int
    """The inner width of the expert that every token passes, behind a gate of its own; 0 where
    there is none.
    """
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What an encoder has in place of a decoder's parts: each token attends to all others, rows of
    a table tell its position, norms come after what they norm and have biases, the MLP no gate.
    """

    positions: int
    """Rows of the table of positions."""
    positions_before: int
    """The rows before that of the first token."""
    types: int
    """Rows of the table of token types."""
    scores: bool
    """It has a head that scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder: RMS norms, rotary grouped-query attention, a gated MLP or a mixture of them; or an
    encoder.
    """

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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    """The checkpoint has queries, keys and values in one matrix, and the MLP's gate and up."""
    rotary_size: int = 0
    """This many elements of a head, from the first, are rotated; 0 stands for all."""
    windows: tuple[int, ...] = ()
    """For each layer the tokens that one attends to, itself included, 0 for all; (): all in all."""
    local_rope: Rope | None = None
    """The rotary embedding of the layers with a window, where they have their own."""
    attention_scale: float = 0.0
    """0: the root of the head size, inverse."""
    activation: str = SILU
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """This number is added to every norm's stored weights."""
    norms_around: bool = False
    """The outputs of attention and MLP are normed as well, before they are added."""
    logit_cap: float = 0.0
    """Logits x become cap * tanh(x / cap); 0: they stay."""
    experts: Experts | None = None
    encoder: Encoder | None = None
    prefix: str = "model."
    """What comes before the names of the checkpoint's tensors."""
    task: Task | None = None
    """What it is built for: not of the model itself, which can do several."""

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def is_mixture(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


def read_architecture(model_path: Path) -> Architecture:
    """The architecture of the model in this store folder.

    Raises TornModel when config.json cannot be read or lacks a field, UnsupportedModel when it asks
    for something that the graph does not have.
    """
    path = model_path / _NAME
    config = read_json(path)
    method = quantisation_of(model_path, config)
    if method:
        raise _unsupported(
            f"checkpoints quantised by {method!r}",
            "take the unquantised model or a GGUF file, or deploy it on vLLM nodes",
        )
    return parse_architecture(config)


def parse_architecture(config: Mapping[str, Any]) -> Architecture:
    """The same from the parsed config. Raises as `read_architecture` does."""
    check_config(config, _NAME)
    kind = str(config.get("model_type", "missing"))
    if kind in ENCODERS:
        return _parse_encoder(config)
    if kind not in SUPPORTED_KINDS:
        raise _unsupported(f"model_type {kind!r}", f"supported: {', '.join(SUPPORTED_KINDS)}")
    config = with_defaults(config)
    given = config.get("hidden_activation") or config.get("hidden_act")
    if given not in _ACTIVATIONS:
        raise _unsupported(f"hidden_act {given!r}", f"supported: {', '.join(_ACTIVATIONS)}")
    if config.get("use_bidirectional_attention"):
        raise _unsupported("use_bidirectional_attention", "deploy it on vLLM nodes")
    if config.get("attn_logit_softcapping"):
        raise _unsupported(
            f"attn_logit_softcapping {config['attn_logit_softcapping']!r}: OpenVINO's paged "
            "attention caps no scores",
            "deploy it on vLLM nodes",
        )
    gemma = kind in GEMMAS
    try:
        heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        head_size = int(config.get("head_dim") or hidden_size // heads)
        layers = int(config["num_hidden_layers"])
        attention_bias = bool(config["attention_bias"])
        qkv_alone = kind in ("qwen2", "qwen2_moe")
        return Architecture(
            kind=kind,
            layers=layers,
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            attention_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=head_size,
            vocabulary_tokens=int(config["vocab_size"]),
            norm_epsilon=number_in(config, "rms_norm_eps", _NAME),
            rope=_parse_rope(config),
            tied_embeddings=bool(config["tie_word_embeddings"]),
            qkv_bias=bool(config.get("qkv_bias", True))
            if kind == "qwen2_moe"
            else attention_bias or kind == "qwen2",
            output_bias=attention_bias and not qkv_alone,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
            fused=kind == "phi3",
            rotary_size=int(head_size * float(config.get("partial_rotary_factor") or 1.0)),
            windows=_windows(config, kind, layers),
            local_rope=Rope(theta=number_in(config, "rope_local_base_freq", _NAME))
            if kind == "gemma3_text"
            else None,
            attention_scale=number_in(config, "query_pre_attn_scalar", _NAME) ** -0.5
            if gemma
            else 0.0,
            activation=_ACTIVATIONS[given],
            embedding_scale=hidden_size**0.5 if gemma else 1.0,
            norm_offset=1.0 if gemma else 0.0,
            norms_around=gemma,
            logit_cap=float(config.get("final_logit_softcapping") or 0.0),
            experts=_experts(config, kind, layers) if kind in MIXTURES else None,
            prefix=str(config.get(PREFIX, "model.")),
        )
    except KeyError as error:
        raise TornModel(f"config.json has no field {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        raise TornModel(f"config.json has a field of a wrong kind: {error}") from error


def _parse_encoder(config: Mapping[str, Any]) -> Architecture:
    shape = encoder_shape(config, _NAME)
    return Architecture(
        kind=shape.architecture,
        layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        attention_heads=shape.heads,
        kv_heads=shape.heads,
        head_size=shape.head_size,
        vocabulary_tokens=shape.vocabulary,
        norm_epsilon=float(config.get("layer_norm_eps") or 1e-12),
        rope=Rope(theta=1.0),
        tied_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation=_OF_ENCODERS[config.get("hidden_act") or "gelu"],
        encoder=Encoder(
            positions=shape.positions,
            positions_before=positions_before(config),
            types=shape.types,
            scores=config.get(ONLY_TASK) == Task.RERANK,
        ),
        prefix=str(config.get(PREFIX, "")),
    )


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """By `layer_types`, or as transformers fills them in for the kind where they are left out."""
    window = int(config.get("sliding_window") or 0)
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        window = 0
    if not window or kind == "llama":
        return ()
    types = config.get("layer_types")
    if types is not None:
        return tuple(window if types[n] == "sliding_attention" else 0 for n in range(layers))
    return tuple(window if _has_window(config, kind, layer) else 0 for layer in range(layers))


def _has_window(config: Mapping[str, Any], kind: str, layer: int) -> bool:
    """Whether the layer has a window, in a model that has windows and no `layer_types`."""
    match kind:
        case "gemma2":
            return layer % 2 == 0
        case "gemma3_text":
            return (layer + 1) % size_in(config, "sliding_window_pattern", _NAME) != 0
        case "qwen2" | "qwen3":
            return layer >= size_in(config, "max_window_layers", _NAME)
        case "qwen2_moe":
            return layer % 2 == 0 and layer < size_in(config, "max_window_layers", _NAME)
        case _:
            return True


def _experts(config: Mapping[str, Any], kind: str, layers: int) -> Experts:
    shared = int(config["shared_expert_intermediate_size"]) if kind == "qwen2_moe" else 0
    return Experts(
        count=int(config["num_experts"]),
        chosen=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        normalised=bool(config["norm_topk_prob"]),
        shared_intermediate_size=shared,
        layers=sparse_layers(config, layers, _NAME),
    )


def _parse_rope(config: Mapping[str, Any]) -> Rope:
    """`rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which holds both."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = number_in(scaling if scaling.get("rope_theta") else config, "rope_theta", _NAME)
    name = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if name == "default":
        return Rope(theta=theta)
    if name == "linear":
        return Rope(theta=theta, scaling=name, factor=number_in(scaling, "factor", _NAME))
    if name == "llama3":
        return Rope(
            theta=theta,
            scaling=name,
            factor=number_in(scaling, "factor", _NAME),
            low_frequency_factor=number_in(scaling, "low_freq_factor", _NAME),
            high_frequency_factor=number_in(scaling, "high_freq_factor", _NAME),
            original_context_tokens=_original_context(config, scaling),
        )
    if name == "longrope":
        return _longrope(config, scaling, theta)
    raise _unsupported(f"rope_scaling {name!r}", f"supported: {', '.join(SUPPORTED_ROPE)}")


def _longrope(config: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> Rope:
    """Phi-3's (Ding et al. 2024, LongRoPE), as transformers reads it."""
    original = _original_context(config, scaling)
    stretch = float(scaling.get("factor") or int(config["max_position_embeddings"]) / original)
    computed = sqrt(1 + log(stretch) / log(original)) if stretch > 1 else 1.0
    return Rope(
        theta=theta,
        scaling="longrope",
        original_context_tokens=original,
        short_factors=tuple(float(factor) for factor in scaling["short_factor"]),
        table_factor=float(scaling.get("attention_factor") or computed),
    )


def _original_context(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Tokens that the model was trained with before its context was stretched."""
    key = "original_max_position_embeddings"
    return int(scaling.get(key) or config.get(key) or config["max_position_embeddings"])


def _unsupported(what: str, hint: str) -> UnsupportedModel:
    return UnsupportedModel(f"the OpenVINO engine does not run {what}", hint=hint)
