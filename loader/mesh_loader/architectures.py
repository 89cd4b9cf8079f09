"""The architectures that mesh runs itself, as the tensors that a config.json promises.

Both importers check a model against this list before they publish it, so an engine never meets a
missing or misshapen tensor. Names and shapes are those of Hugging Face transformers; the GGUF names
are llama.cpp's. Nothing is read or written here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.model import Mixture
from mesh.domain.values import dataclass
from mesh_loader.config_keys import CONFIG, ROPE, SIZE, check_config, shown

GEMMAS = ("gemma2", "gemma3_text")
MIXTURES = ("qwen2_moe", "qwen3_moe")
GGUF_ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "phi3")},
    "gemma3": "gemma3_text",
}
"""By llama.cpp's names."""
NATIVE_ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "phi3", *GEMMAS, *MIXTURES)

_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN = {**_WINDOW, "max_window_layers": 28}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_MIXTURE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_COMMON = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_act": "silu", "mlp_bias": False},
    "mistral": {"hidden_act": "silu", "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"hidden_act": "silu", "num_key_value_heads": 32, **_QWEN},
    "qwen3": {"hidden_act": "silu", "num_key_value_heads": 32, "head_dim": 128, **_QWEN},
    "phi3": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    "gemma2": {**_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {
        **_GEMMA,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "use_bidirectional_attention": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    "qwen2_moe": {
        "hidden_act": "silu",
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
        **_QWEN,
        **_MIXTURE,
    },
    "qwen3_moe": {
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        **_WINDOW,
        **_MIXTURE,
    },
}
"""What a key that config.json leaves out means: transformers' default for the model type.

`tests/data/defaults.json` has transformers' own values, which a test compares with these. A head's
size that is not here is the hidden size divided by the heads, and KV heads are as many as heads.
"""

ARCHITECTURE_HINT = (
    f"mesh runs {', '.join(NATIVE_ARCHITECTURES)} itself; other Hugging Face folders are exported "
    "to OpenVINO after: pip install 'mesh-serve[convert]'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """One tensor that the model must have."""

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    rotary_heads: int = 0
    """Heads of a query or key projection, 0 for any other tensor: llama.cpp reorders their rows."""
    gguf_offset: float = 0.0
    """What llama.cpp has added to its values: Gemma's norms multiply by one more than is stored."""

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that a config.json states, in elements, heads and layers."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    attention_bias: bool
    experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    mixtures: tuple[int, ...] = ()
    """Layers with experts."""
    prefix: str = "model."
    """What comes before the names of all tensors but the head's."""
    positions: int = 0
    """Rows of an encoder's table of positions; 0 of a decoder."""
    types: int = 0
    """Rows of an encoder's table of token types."""
    scores: bool = False
    """It has a head that scores."""


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the keys that it leaves out; what it says, null included, stays."""
    kind = config.get("model_type")
    family = DEFAULTS.get(kind) if isinstance(kind, str) else None
    if family is None:
        return dict(config)
    filled = {**_COMMON, **family, **config}
    if "num_local_experts" in config and "num_experts" not in config:
        filled["num_experts"] = config["num_local_experts"]
    return filled


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """The sizes in the config of a native architecture; `name` is the file for error messages.

    Raises UnsupportedModel for another architecture or an unusual feature of these, TornModel where
    a size is missing or impossible.
    """
    architecture = str(config.get("model_type"))
    if architecture not in NATIVE_ARCHITECTURES:
        raise UnsupportedModel(
            f"{name}: architecture {architecture} is not one that mesh runs", hint=ARCHITECTURE_HINT
        )
    check_config(config, name)
    config = with_defaults(config)
    hidden, heads = (
        size_in(config, "hidden_size", name),
        size_in(config, "num_attention_heads", name),
    )
    layers = size_in(config, "num_hidden_layers", name)
    mixture = architecture in MIXTURES
    shape = Shape(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=size_in(config, "intermediate_size", name),
        heads=heads,
        kv_heads=size_in(config, "num_key_value_heads", name, heads),
        head_size=size_in(config, "head_dim", name, hidden // heads),
        vocabulary=size_in(config, "vocab_size", name),
        tied=bool(config["tie_word_embeddings"]),
        attention_bias=_has_bias(config, architecture),
        experts=size_in(config, "num_experts", name) if mixture else 0,
        expert_intermediate=size_in(config, "moe_intermediate_size", name) if mixture else 0,
        shared_intermediate=size_in(config, "shared_expert_intermediate_size", name)
        if architecture == "qwen2_moe"
        else 0,
        mixtures=sparse_layers(config, layers, name) if mixture else (),
    )
    _refuse_unusual(config, shape, name)
    return shape


def _has_bias(config: Mapping[str, Any], architecture: str) -> bool:
    """Whether the attention's projections have biases: Qwen2's always."""
    if architecture == "qwen2_moe":
        return bool(config["qkv_bias"])
    return architecture == "qwen2" or bool(config["attention_bias"])


def sparse_layers(config: Mapping[str, Any], layers: int, name: str) -> tuple[int, ...]:
    """The layers of a mixture that have experts, as transformers chooses them."""
    step = size_in(config, "decoder_sparse_step", name, 1)
    dense = config.get("mlp_only_layers") or ()
    return tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0)


def mixture_of(config: Mapping[str, Any], name: str) -> Mixture | None:
    """The experts that the config of a mixture states. Raises TornModel for what is none."""
    if config.get("model_type") not in MIXTURES:
        return None
    config = with_defaults(config)
    experts = size_in(config, "num_experts", name)
    layers = len(sparse_layers(config, size_in(config, "num_hidden_layers", name), name))
    size = size_in(config, "moe_intermediate_size", name)
    parameters = layers * experts * 3 * size * size_in(config, "hidden_size", name)
    chosen = min(size_in(config, "num_experts_per_tok", name), experts)
    return Mixture(experts=experts, chosen=chosen, parameters=parameters)


def size_in(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    """A size of a config. Raises TornModel, with the file's name, for anything else."""
    value: Any = config.get(key)
    value = default if value is None else value
    kind = CONFIG.get(key, SIZE)
    if not kind.takes(value):
        raise TornModel(f"{name}: {key} should be {kind}, it is {shown(value)}")
    return int(value)


def number_in(config: Mapping[str, Any], key: str, name: str) -> float:
    """A number of a config, or of an object in it. Raises TornModel, with the file's name, where it
    is absent or null.
    """
    value, kind = config.get(key), CONFIG.get(key) or ROPE[key]
    if not kind.takes(value):
        said = "null" if key in config else "missing"
        raise TornModel(
            f"{name}: {key} should be {kind}, it is {said if value is None else shown(value)}"
        )
    return float(config[key])


def check_rotary(shape: Shape, partial: float | None, name: str) -> None:
    """Raises TornModel where the rotated part of a head, by default all of it, is no pairs."""
    rotary = int(shape.head_size * (1.0 if partial is None else partial))
    if rotary < 2 or rotary % 2 or shape.head_size % 2:
        raise TornModel(
            f"{name}: of heads of {shape.head_size} elements {rotary} are to be rotated, in pairs"
        )


def _refuse_unusual(config: Mapping[str, Any], shape: Shape, name: str) -> None:
    if shape.heads % shape.kv_heads:
        raise TornModel(f"{name}: {shape.heads} heads do not divide into {shape.kv_heads} KV heads")
    check_rotary(shape, config.get("partial_rotary_factor"), name)
    number_in(config, "rms_norm_eps", name)
    if shape.architecture in GEMMAS:
        number_in(config, "query_pre_attn_scalar", name)
    types = config.get("layer_types")
    if types is not None and len(types) < shape.layers:
        raise TornModel(f"{name}: {len(types)} layer_types for {shape.layers} layers")
    gemma = shape.architecture in GEMMAS
    activation = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    activations = ("gelu_pytorch_tanh",) if gemma else ("silu", "swish")
    unusual = {
        "use_bidirectional_attention": config.get("use_bidirectional_attention") is True,
        "mlp_bias": config.get("mlp_bias") is True,
        activation: config.get(activation, activations[0]) not in activations,
        "partial_rotary_factor": config.get("partial_rotary_factor") not in (None, 1.0)
        and shape.architecture != "phi3",
    }
    for key, found in unusual.items():
        if found:
            raise UnsupportedModel(
                f"{name}: {shape.architecture} with {key} = {config.get(key)!r} is not supported",
                hint="use a variant of the model without it",
            )


def expected_tensors(shape: Shape) -> Iterator[ExpectedTensor]:
    """Every tensor of the model, in the order in which an engine reads them."""
    yield ExpectedTensor(
        name=f"{shape.prefix}embed_tokens.weight",
        gguf_name="token_embd.weight",
        shape=(shape.vocabulary, shape.hidden),
    )
    for layer in range(shape.layers):
        yield from _layer_tensors(shape, layer)
    yield ExpectedTensor(
        name=f"{shape.prefix}norm.weight",
        gguf_name="output_norm.weight",
        shape=(shape.hidden,),
        gguf_offset=_norm_offset(shape),
    )
    if not shape.tied:
        yield ExpectedTensor(
            name="lm_head.weight", gguf_name="output.weight", shape=(shape.vocabulary, shape.hidden)
        )


def _layer_tensors(shape: Shape, layer: int) -> Iterator[ExpectedTensor]:
    for name, gguf_name, size in _norms(shape):
        yield ExpectedTensor(
            name=f"{shape.prefix}layers.{layer}.{name}.weight",
            gguf_name=f"blk.{layer}.{gguf_name}.weight",
            shape=(size,),
            gguf_offset=_norm_offset(shape),
        )
    mixture = layer in shape.mixtures
    mlp = _experts(shape) if mixture else _mlp(shape, "mlp", shape.intermediate)
    for name, gguf_name, outputs, inputs, rotary_heads, biased in (*_attention(shape), *mlp):
        yield ExpectedTensor(
            name=f"{shape.prefix}layers.{layer}.{name}.weight",
            gguf_name=f"blk.{layer}.{gguf_name}.weight",
            shape=(outputs, inputs),
            rotary_heads=rotary_heads,
        )
        if biased and shape.attention_bias:
            yield ExpectedTensor(
                name=f"{shape.prefix}layers.{layer}.{name}.bias",
                gguf_name=f"blk.{layer}.{gguf_name}.bias",
                shape=(outputs,),
                rotary_heads=rotary_heads,
            )


def _norm_offset(shape: Shape) -> float:
    return 1.0 if shape.architecture in GEMMAS else 0.0


def _norms(shape: Shape) -> list[tuple[str, str, int]]:
    """Name, GGUF name, size."""
    norms = [("input_layernorm", "attn_norm", shape.hidden)]
    if shape.architecture in GEMMAS:
        norms += [
            ("post_attention_layernorm", "post_attention_norm", shape.hidden),
            ("pre_feedforward_layernorm", "ffn_norm", shape.hidden),
            ("post_feedforward_layernorm", "post_ffw_norm", shape.hidden),
        ]
    else:
        norms += [("post_attention_layernorm", "ffn_norm", shape.hidden)]
    if shape.architecture in ("qwen3", "qwen3_moe", "gemma3_text"):
        norms += [
            ("self_attn.q_norm", "attn_q_norm", shape.head_size),
            ("self_attn.k_norm", "attn_k_norm", shape.head_size),
        ]
    return norms


_Projection = tuple[str, str, int, int, int, bool]
"""Name, GGUF name, output size, input size, heads where rotary, whether it may have a bias."""


def _attention(shape: Shape) -> tuple[_Projection, ...]:
    query_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    # Qwen2 has biases on q, k and v alone.
    biased = not shape.architecture.startswith("qwen2")
    output = ("self_attn.o_proj", "attn_output", shape.hidden, query_size, 0, biased)
    if shape.architecture == "phi3":
        rows = query_size + 2 * kv_size
        return (("self_attn.qkv_proj", "attn_qkv", rows, shape.hidden, 0, True), output)
    return (
        ("self_attn.q_proj", "attn_q", query_size, shape.hidden, shape.heads, True),
        ("self_attn.k_proj", "attn_k", kv_size, shape.hidden, shape.kv_heads, True),
        ("self_attn.v_proj", "attn_v", kv_size, shape.hidden, 0, True),
        output,
    )


def _mlp(shape: Shape, name: str, size: int) -> tuple[_Projection, ...]:
    down = (f"{name}.down_proj", "ffn_down", shape.hidden, size, 0, False)
    if shape.architecture == "phi3":
        return ((f"{name}.gate_up_proj", "ffn_up", 2 * size, shape.hidden, 0, False), down)
    return (
        (f"{name}.gate_proj", "ffn_gate", size, shape.hidden, 0, False),
        (f"{name}.up_proj", "ffn_up", size, shape.hidden, 0, False),
        down,
    )


def _experts(shape: Shape) -> Iterator[_Projection]:
    """GGUF, which has all experts in one tensor, is not read: its names are left out."""
    yield ("mlp.gate", "", shape.experts, shape.hidden, 0, False)
    for number in range(shape.experts):
        yield from _mlp(shape, f"mlp.experts.{number}", shape.expert_intermediate)
    if shape.shared_intermediate:
        yield from _mlp(shape, "mlp.shared_expert", shape.shared_intermediate)
        yield ("mlp.shared_expert_gate", "", 1, shape.hidden, 0, False)
