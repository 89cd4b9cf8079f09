"""Tiny GGUF models written on the spot: random weights of a chosen architecture and a tokenizer.

Made with the gguf package's own writer, as llama.cpp's converters do, rotary interleaving included,
so a test can say what the imported tensors must be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from mesh_loader.gguf_file import MetadataValue

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 64, 128, 2, 4, 2, 16
CONTEXT_TOKENS_MAX = 256
Array = npt.NDArray[np.float32]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@dataclass(frozen=True, kw_only=True)
class TinyTokenizer:
    """A vocabulary as GGUF holds it."""

    model: str
    tokens: list[str]
    types: list[int]
    pre: str | None = None
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None


def byte_level_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def byte_tokenizer(pre: str | None = "gpt-2") -> TinyTokenizer:
    """One token a byte, then BOS, EOS and the end of a chat turn; no merges but one."""
    alphabet = byte_level_alphabet()
    return TinyTokenizer(
        model="gpt2",
        pre=pre,
        tokens=[*alphabet, "he", "<s>", "</s>", "<|im_end|>"],
        types=[*[NORMAL] * 257, CONTROL, CONTROL, CONTROL],
        merges=["h e"],
        bos=257,
        eos=258,
    )


def random_tensors(
    architecture: str, vocabulary: int, *, tied: bool = False, bias: bool = False, seed: int = 0
) -> dict[str, Array]:
    """Weights under Hugging Face names and in Hugging Face order, each representable in f16."""
    kv_size, query_size = KV_HEADS * HEAD_SIZE, HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if architecture == "gemma3":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            shapes[f"{prefix}{norm}.weight"] = (HIDDEN,)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, query_size)
        if architecture == "phi3":
            rows = query_size + 2 * kv_size
            shapes[prefix + "self_attn.qkv_proj.weight"] = (rows, HIDDEN)
            shapes[prefix + "mlp.gate_up_proj.weight"] = (2 * INTERMEDIATE, HIDDEN)
            continue
        shapes[prefix + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[prefix + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        for name, size in (("q", query_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, HIDDEN)
            if bias or architecture == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        if bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (HIDDEN,)
        if architecture in ("qwen3", "gemma3"):
            shapes[prefix + "self_attn.q_norm.weight"] = (HEAD_SIZE,)
            shapes[prefix + "self_attn.k_norm.weight"] = (HEAD_SIZE,)
    draw = np.random.default_rng(seed)
    return {
        name: draw.standard_normal(shape).astype(np.float16).astype(np.float32)
        for name, shape in shapes.items()
    }


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "after_attention": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_name(name: str, architecture: str = "llama") -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if architecture == "gemma3":
        name = name.replace("post_attention_layernorm", "after_attention")
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def interleaved(array: Array, heads: int) -> Array:
    """llama.cpp's order of query and key rows, as its llama converter makes it."""
    head_size = array.shape[0] // heads
    halves = array.reshape(heads, 2, head_size // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    tokenizer: TinyTokenizer | None = None,
    tensors: dict[str, Array] | None = None,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F16,
    extra: dict[str, Array] | None = None,
    metadata: Mapping[str, MetadataValue] | None = None,
) -> dict[str, Array]:
    """Writes a model; returns its tensors under Hugging Face names, as they were before storing.

    `extra` are further tensors under GGUF names, `metadata` further or other entries.
    """
    tokenizer = tokenizer or byte_tokenizer()
    tensors = tensors or random_tensors(architecture, len(tokenizer.tokens))
    writer = gguf.GGUFWriter(path, architecture)
    entries: dict[str, MetadataValue] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": CONTEXT_TOKENS_MAX,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INTERMEDIATE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        **(metadata or {}),
    }
    for key, value in entries.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            add = writer.add_int64 if value < 0 else writer.add_uint64
            (add if value < 0 or value >= 2**32 else writer.add_uint32)(key, value)
        else:
            writer.add_float32(key, float(value))
    _add_tokenizer(writer, tokenizer)
    for name, array in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
        stored = interleaved(array, heads) if heads and architecture == "llama" else array
        if stored.ndim == 1:
            # As its converter does with Gemma's norms.
            stored = stored + 1 if architecture == "gemma3" else stored
            writer.add_tensor(gguf_name(name, architecture), stored)
        else:
            packed = gguf.quants.quantize(stored, quantization)
            writer.add_tensor(gguf_name(name, architecture), packed, raw_dtype=quantization)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: TinyTokenizer) -> None:
    writer.add_tokenizer_model(tokenizer.model)
    if tokenizer.pre is not None:
        writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    if tokenizer.merges:
        writer.add_token_merges(tokenizer.merges)
    if tokenizer.scores:
        writer.add_token_scores(tokenizer.scores)
    if tokenizer.bos is not None:
        writer.add_bos_token_id(tokenizer.bos)
    if tokenizer.eos is not None:
        writer.add_eos_token_id(tokenizer.eos)
    if tokenizer.unknown is not None:
        writer.add_unk_token_id(tokenizer.unknown)
