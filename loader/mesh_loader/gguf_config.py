"""The config.json of a GGUF model, from the metadata that llama.cpp wrote.

Decides whether the file is one of mesh's architectures without features that mesh would silently
leave out. gguf_file has read the metadata; gguf_tensors then checks the tensors against the result.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import UnsupportedModel
from mesh_loader.architectures import GGUF_ARCHITECTURES
from mesh_loader.config_keys import POOLING, TEXT_CHARS_MAX, check_config, shown
from mesh_loader.encoders import Pooling
from mesh_loader.gguf_file import GgufFile, corrupt
from mesh_loader.gguf_tensors import read_small

# Llama 3's rotary scaling, as Meta fixed it for 3.1 and 3.2; GGUF keeps only the resulting factors.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT_TOKENS = 8192
GEMMA3_27B_LAYERS = 62
_POOLINGS = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
"""llama.cpp's numbers of them."""
GEMMA3_WINDOW_PATTERN = 6
_UNCOMPUTED: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0.0, 1.0)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0.0,)),
    "attn_logit_softcapping": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Numbers by which some architectures of llama.cpp compute otherwise than mesh does, after the name
of the architecture, and the values of each that change nothing.
"""


def config_of(file: GgufFile) -> dict[str, Any]:
    """A Hugging Face config of the model in the file.

    Raises UnsupportedModel for another architecture or a feature that mesh does not run, TornModel
    for metadata that is missing or contradicts itself.
    """
    name = file.path.name
    architecture = file.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{name}: architecture {architecture[:TEXT_CHARS_MAX]} is not supported in GGUF",
            hint=f"mesh imports {', '.join(GGUF_ARCHITECTURES)} from GGUF",
        )
    kind = file.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(
            f"{name} is no model: its general.type is {shown(kind)}",
            hint="name the model's own file; an adapter is merged into its base first",
        )
    if file.integer("split.count", 1) > 1:
        raise UnsupportedModel(
            f"{name} is one part of {file.integer('split.count')}",
            hint="merge the parts first: llama-gguf-split --merge FIRST-PART.gguf whole.gguf",
        )
    if file.integer(f"{architecture}.expert_count", 0) > 0:
        raise UnsupportedModel(f"{name}: mixtures of experts are not supported")
    _refuse_uncomputed(file, architecture)
    heads = file.integer(f"{architecture}.attention.head_count")
    hidden_size = file.integer(f"{architecture}.embedding_length")
    if heads < 1 or hidden_size < 1:
        raise corrupt(name, f"{heads} heads over an embedding of {hidden_size}")
    head_size = _head_size(file, architecture, hidden_size // heads)
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "head_dim": head_size}
    check_config(sizes, name)
    return {
        "model_type": GGUF_ARCHITECTURES[architecture],
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{architecture}.attention.head_count_kv", heads),
        "head_dim": head_size,
        "rms_norm_eps": shortest(file.number(f"{architecture}.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(file.number(f"{architecture}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, architecture, head_size),
        "max_position_embeddings": file.integer(f"{architecture}.context_length"),
        "vocab_size": _vocabulary_rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float16",
        **_of_embeddings(file, architecture),
        **_of_family(file, architecture, heads, hidden_size, head_size),
    }


def _refuse_uncomputed(file: GgufFile, architecture: str) -> None:
    """Raises UnsupportedModel for a number by which mesh would have to compute otherwise."""
    capped = {} if architecture == "gemma3" else {"final_logit_softcapping": (0.0,)}
    for name, neutral in {**_UNCOMPUTED, **capped}.items():
        key = f"{architecture}.{name}"
        if (value := file.number(key, neutral[0])) not in neutral:
            raise UnsupportedModel(
                f"{file.path.name}: {key} = {value:g} is not supported, only {neutral[-1]:g}"
            )


def _of_embeddings(file: GgufFile, architecture: str) -> dict[str, Any]:
    """How a text is embedded, where the metadata says it."""
    name, causal = file.path.name, f"{architecture}.attention.causal"
    if not file.flag(causal, True):
        raise UnsupportedModel(f"{name}: {causal} = false is not supported in GGUF")
    key = f"{architecture}.pooling_type"
    if key not in file.metadata:
        return {}
    pooling = _POOLINGS.get(file.integer(key))
    if pooling is None:
        raise UnsupportedModel(
            f"{name}: {key} = {file.integer(key)} is not supported",
            hint="supported: 1 (mean), 2 (cls) and 3 (last)",
        )
    return {POOLING: pooling}


def _of_family(
    file: GgufFile, architecture: str, heads: int, hidden_size: int, head_size: int
) -> dict[str, Any]:
    """What the metadata of one family alone says, or leaves to llama.cpp's source. llama.cpp itself
    computes no windows of Phi-3; mesh does, as transformers does.
    """
    window = file.integer(f"{architecture}.attention.sliding_window", 0) or None
    if architecture == "phi3":
        rotary = file.integer("phi3.rope.dimension_count", head_size)
        return {"sliding_window": window, "partial_rotary_factor": rotary / head_size}
    if architecture != "gemma3":
        return {}
    # Of the 27B, which alone has so many layers, by the head size that its width would have.
    widest = file.integer("gemma3.block_count") == GEMMA3_27B_LAYERS
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": window,
        "sliding_window_pattern": _window_pattern(file),
        "final_logit_softcapping": file.number("gemma3.final_logit_softcapping", 0.0) or None,
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": hidden_size // heads if widest else head_size,
    }


def _window_pattern(file: GgufFile) -> int:
    """The pattern of windows in Gemma 3: every layer whose number this divides attends to all
    tokens.
    """
    key = "gemma3.attention.sliding_window_pattern"
    if isinstance(file.metadata.get(key), list):
        raise UnsupportedModel(f"{file.path.name}: {key} is a list, mesh reads a number")
    return file.integer(key, GEMMA3_WINDOW_PATTERN)


def _head_size(file: GgufFile, architecture: str, default: int) -> int:
    head_size = file.integer(f"{architecture}.attention.key_length", default)
    value_size = file.integer(f"{architecture}.attention.value_length", default)
    rotary_size = file.integer(f"{architecture}.rope.dimension_count", head_size)
    # Phi-3 rotates a part.
    if head_size != value_size or (rotary_size != head_size and architecture != "phi3"):
        raise UnsupportedModel(
            f"{file.path.name}: keys of {head_size}, values of {value_size} and a rotary part of "
            f"{rotary_size} elements; mesh needs the three equal"
        )
    return head_size


def _vocabulary_rows(file: GgufFile) -> int:
    """Rows of the embedding, which may be padded past the tokenizer's vocabulary."""
    tokens = len(file.texts("tokenizer.ggml.tokens"))
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else tokens
    if tokens > rows:
        raise corrupt(file.path.name, f"{tokens} tokens but an embedding of {rows} rows")
    return rows


def _rope_scaling(file: GgufFile, architecture: str, head_size: int) -> dict[str, Any] | None:
    """The rotary scaling, with llama.cpp's defaults: a factor without a type is linear, a factor of
    0 is none, and yarn's original context is the context.
    """
    scaling = f"{architecture}.rope.scaling"
    old_factor = file.number(f"{architecture}.rope.scale_linear", 0.0)
    factor = file.number(f"{scaling}.factor", old_factor) or 1.0
    kind = file.text(f"{scaling}.type", "linear")
    if "rope_freqs.weight" in file.tensors:
        factors = _llama3_scaling(file, architecture, head_size)
        if factors is not None and kind != "none" and factor != 1.0:
            raise UnsupportedModel(
                f"{file.path.name}: rope_freqs.weight beside a rotary factor of {factor:g} is not "
                "supported"
            )
        if factors is not None:
            return factors
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        context = file.integer(f"{architecture}.context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": file.integer(
                f"{scaling}.original_context_length", context
            ),
            **{
                beta: file.number(f"{scaling}.yarn_{beta}")
                for beta in ("beta_fast", "beta_slow")
                if f"{scaling}.yarn_{beta}" in file.metadata
            },
        }
    raise UnsupportedModel(f"{file.path.name}: rotary scaling {kind} is not supported")


def _llama3_scaling(file: GgufFile, architecture: str, head_size: int) -> dict[str, Any] | None:
    """The parameters behind a tensor of frequency factors; the largest of them is `factor`."""
    stored = read_small(file, "rope_freqs.weight")
    if stored.size != head_size // 2 or not np.isfinite(stored).all() or stored.min() <= 0.0:
        raise UnsupportedModel(f"{file.path.name}: rope_freqs.weight is not Llama 3's scaling")
    factor = round(float(stored.max()), 4)
    if factor == 1.0 and float(stored.min()) == 1.0:
        return None
    theta = file.number(f"{architecture}.rope.freq_base", 10000.0)
    computed = llama3_frequency_factors(theta, head_size, factor)
    if stored.shape != computed.shape or not np.allclose(stored, computed, rtol=1e-3):
        raise UnsupportedModel(f"{file.path.name}: rope_freqs.weight is not Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT_TOKENS,
    }


def llama3_frequency_factors(
    theta: float, head_size: int, factor: float
) -> npt.NDArray[np.float64]:
    """By what each rotary frequency is divided, [head_size / 2] (Llama 3.1's long-context recipe).

    Wavelengths below original / high_freq_factor stay, those above original / low_freq_factor are
    divided by `factor`, and those between are blended linearly in original / wavelength.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = (LLAMA3_ORIGINAL_CONTEXT_TOKENS / wavelengths - LLAMA3_LOW_FREQ_FACTOR) / (
        LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors


def shortest(value: float) -> float:
    """The shortest decimal that is the same f32: 9.999999747378752e-06 was meant as 1e-05."""
    return float(str(np.float32(value)))
