"""Folders of tiny models, each hostile in one respect: a template, a tokenizer, a file.

They are Hugging Face folders of a Llama with random weights and a vocabulary of bytes, so that an
import takes no time of its own.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD, UP = 64, 2, 1, 32, 128
MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
Patch = Callable[[dict[str, Any]], object]
Damage = Callable[[Path], object]


def tiny_model(
    folder: Path,
    *,
    template: str = TEMPLATE,
    config: Mapping[str, object] | None = None,
    tokenizer: Patch | None = None,
    damage: Damage | None = None,
) -> Path:
    """The folder, made. `config` replaces keys of config.json, `tokenizer` changes what
    tokenizer.json says, `damage` is done to the folder at the end.
    """
    folder.mkdir(parents=True)
    said = json.loads(_tokenizer().to_str())
    vocabulary = len(said["model"]["vocab"]) + len(MARKS)
    if tokenizer is not None:
        tokenizer(said)
    _write(folder / "tokenizer.json", said)
    _write(folder / "tokenizer_config.json", {"eos_token": MARKS[1], "chat_template": template})
    _write(folder / "config.json", _config(vocabulary) | dict(config or {}))
    (folder / "model.safetensors").write_bytes(save(_weights(vocabulary)))
    if damage is not None:
        damage(folder)
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return found


def _config(vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": UP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
        "eos_token_id": vocabulary - 1,
    }


def _weights(vocabulary: int) -> dict[str, np.ndarray[Any, Any]]:
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{layer}mlp.gate_proj.weight": (UP, HIDDEN),
        f"{layer}mlp.up_proj.weight": (UP, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, UP),
    }
    rng = np.random.default_rng(1)
    return {
        name: (rng.standard_normal(shape) * 0.05).astype(np.float16)
        for name, shape in shapes.items()
    }
