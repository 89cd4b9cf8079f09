"""A Llama in a Hugging Face folder, made up on the spot: random weights, a byte tokenizer.

For tests and benchmarks that need a model which the store imports and an engine loads, but not one
that makes sense; tiny unless another shape is asked for. Written from a seed: the same seed and
shape give the same bytes, another seed another model.
"""

import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<s>", "</s>"
CONTEXT_TOKENS_MAX = 512
HEAD_SIZE = 8
"""The head size of the tiny model."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    hidden: int = 32
    intermediate: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = HEAD_SIZE


def write_tiny_llama(folder: Path, *, seed: int = 0, head_size: int = HEAD_SIZE) -> Path:
    """Write a tiny model into `folder`, which is created; returns it."""
    return write_llama(folder, LlamaShape(head_size=head_size), seed=seed)


def write_llama(folder: Path, shape: LlamaShape, *, seed: int = 0) -> Path:
    """Write a model of this shape into `folder`, which is created; returns it."""
    folder.mkdir(parents=True)
    tokenizer = _byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(_config(vocabulary, shape), indent=2))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": BOS,
                "eos_token": EOS,
                "add_bos_token": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    tensors = _tensors(vocabulary, seed, shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _byte_tokenizer() -> Tokenizer:
    """One token a byte: ids 0 and 1 are BOS and EOS, then the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {BOS: 0, EOS: 1} | {char: 2 + n for n, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def _config(vocabulary: int, shape: LlamaShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float16",
    }


def _tensors(vocabulary: int, seed: int, shape: LlamaShape) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    hidden, intermediate = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    deviation = 0.3 * sqrt(32 / hidden)
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
    return {
        name: (
            np.ones(shape, np.float16)
            if "norm" in name
            else (draw.standard_normal(shape) * deviation).astype(np.float16)
        )
        for name, shape in shapes.items()
    }
