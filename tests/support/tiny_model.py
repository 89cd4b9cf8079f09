"""A tiny Llama in a Hugging Face folder, made up on the spot: random weights, a byte tokenizer.

For tests that need a model which the store imports and an engine loads, but not one that makes
sense. Written from a seed: the same seed gives the same bytes, another seed another model.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<s>", "</s>"
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 32, 64, 2, 4, 2, 8
CONTEXT_TOKENS_MAX = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_llama(folder: Path, *, seed: int = 0, head_size: int = HEAD_SIZE) -> Path:
    """Write the model into `folder`, which is created; returns it."""
    folder.mkdir(parents=True)
    tokenizer = _byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(_config(vocabulary, head_size), indent=2))
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
    tensors = _tensors(vocabulary, seed, head_size)
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


def _config(vocabulary: int, head_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_size,
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


def _tensors(vocabulary: int, seed: int, head_size: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocabulary, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * head_size, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * head_size, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * head_size, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * head_size),
            prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return {
        name: (
            np.ones(shape, np.float16)
            if "norm" in name
            else (draw.standard_normal(shape) * 0.3).astype(np.float16)
        )
        for name, shape in shapes.items()
    }
