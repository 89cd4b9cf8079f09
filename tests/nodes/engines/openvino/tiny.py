"""Tiny models with random weights, and what they compute, written a second time in numpy.

`reference_logits` shares no code with the engine: one token at a time over plain lists of keys and
values, rotation by complex numbers. What both agree on is the architecture itself.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from mesh.domain.ids import ModelId
from mesh.domain.model import ModelFormat, ModelInfo

Floats = npt.NDArray[np.float64]

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 97, 64, 128, 2, 4, 2, 16
CONTEXT_TOKENS_MAX = 256
STOP_TOKEN = 2


@dataclass(frozen=True, slots=True)
class TinyModel:
    path: Path
    info: ModelInfo


def write_tiny(
    folder: Path,
    kind: str = "llama",
    *,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    seed: int = 0,
) -> TinyModel:
    """A store folder of a model of this kind: its seed decides the weights."""
    folder.mkdir(parents=True)
    config = {
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _tensors(kind, tied, seed)
    save_file(tensors, folder / "model.safetensors")
    info = ModelInfo(
        model_id=ModelId(f"tiny-{kind}"),
        source="made in the test",
        format=ModelFormat.SAFETENSORS,
        architecture=kind,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        vocabulary_tokens=VOCABULARY,
        layers=LAYERS,
        hidden_size=HIDDEN,
        attention_heads=HEADS,
        kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        parameters=sum(tensor.size for tensor in tensors.values()),
        disk_bytes=(folder / "model.safetensors").stat().st_size,
        stop_token_ids=(STOP_TOKEN,),
    )
    return TinyModel(folder, info)


def _tensors(kind: str, tied: bool, seed: int) -> dict[str, npt.NDArray[np.float16]]:
    rng = np.random.default_rng(seed)
    query, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE

    def draw(*shape: int, around: float = 0.0, spread: float = 0.15) -> npt.NDArray[np.float16]:
        return (around + spread * rng.standard_normal(shape)).astype(np.float16)

    tensors = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN, spread=1.0),
        "model.norm.weight": draw(HIDDEN, around=1.0),
    }
    if not tied:
        tensors["lm_head.weight"] = draw(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = draw(HIDDEN, around=1.0)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = draw(HIDDEN, around=1.0)
        for name, rows, columns in (
            ("self_attn.q_proj", query, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, query),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):
            tensors[f"{prefix}.{name}.weight"] = draw(rows, columns)
            if kind == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}.{name}.bias"] = draw(rows, spread=0.5)
        if kind == "qwen3":
            tensors[f"{prefix}.self_attn.q_norm.weight"] = draw(HEAD_SIZE, around=1.0)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = draw(HEAD_SIZE, around=1.0)
    return tensors


def reference_logits(folder: Path, tokens: list[int]) -> Floats:
    """Logits after each token, [tokens, vocabulary], in double precision."""
    stored = load_file(folder / "model.safetensors")
    weights = {name: tensor.astype(np.float64) for name, tensor in stored.items()}
    config = json.loads((folder / "config.json").read_text())
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    cache: list[tuple[list[Floats], list[Floats]]] = [([], []) for _ in range(LAYERS)]
    rows = []
    for position, token in enumerate(tokens):
        x = weights["model.embed_tokens.weight"][token]
        for layer, (keys, values) in enumerate(cache):
            x = _layer(weights, config, f"model.layers.{layer}.", x, position, keys, values)
        rows.append(head @ _rms(x, weights["model.norm.weight"]))
    return np.array(rows)


def _layer(
    weights: dict[str, Floats],
    config: dict[str, Any],
    prefix: str,
    x: Floats,
    position: int,
    keys: list[Floats],
    values: list[Floats],
) -> Floats:
    def project(name: str, y: Floats) -> Floats:
        bias = weights.get(f"{prefix}{name}.bias", np.zeros(1))
        return weights[f"{prefix}{name}.weight"] @ y + bias

    def heads(name: str) -> Floats:
        y = project(f"self_attn.{name}_proj", h).reshape(-1, HEAD_SIZE)
        norm = weights.get(f"{prefix}self_attn.{name}_norm.weight")
        if norm is not None:
            y = np.array([_rms(head, norm) for head in y])
        return _rotate(y, position, config)

    h = _rms(x, weights[f"{prefix}input_layernorm.weight"])
    query = heads("q")
    keys.append(heads("k"))
    values.append(project("self_attn.v_proj", h).reshape(-1, HEAD_SIZE))
    attended = []
    for head in range(HEADS):
        group = head * KV_HEADS // HEADS
        scores = np.array([k[group] @ query[head] for k in keys]) / np.sqrt(HEAD_SIZE)
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        attended.append(sum(s * v[group] for s, v in zip(shares, values, strict=True)))
    x = x + project("self_attn.o_proj", np.concatenate(attended))
    h = _rms(x, weights[f"{prefix}post_attention_layernorm.weight"])
    gate = project("mlp.gate_proj", h)
    gated = gate / (1 + np.exp(-gate)) * project("mlp.up_proj", h)
    return x + project("mlp.down_proj", gated)


def _rms(x: Floats, weight: Floats) -> Floats:
    scaled: Floats = weight * x / np.sqrt(np.mean(x * x) + 1e-5)
    return scaled


def _rotate(x: Floats, position: int, config: dict[str, Any]) -> Floats:
    """Element i and i + size / 2 of each head are one complex number."""
    half = HEAD_SIZE // 2
    turned = np.array([position * _frequency(pair, config) for pair in range(half)])
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * turned)
    return np.concatenate([z.real, z.imag], axis=1)


def _frequency(pair: int, config: dict[str, Any]) -> float:
    """Radians per position, in the words of transformers' llama3 and linear scaling."""
    frequency = float(config["rope_theta"] ** (-2 * pair / HEAD_SIZE))
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") == "linear":
        return frequency / float(scaling["factor"])
    if scaling.get("rope_type") == "llama3":
        old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wavelength = 2 * np.pi / frequency
        if wavelength > old / low:
            return frequency / float(factor)
        if wavelength >= old / high:
            smooth = (old / wavelength - low) / (high - low)
            return float((1 - smooth) * frequency / factor + smooth * frequency)
    return frequency
