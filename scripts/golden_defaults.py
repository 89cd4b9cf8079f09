"""What transformers and llama.cpp take for a key that a model's configuration leaves out.

Written to `tests/data/defaults.json`, which tests compare with mesh's own defaults. transformers'
values are read from its classes (`pip install transformers`, which needs no torch for it);
llama.cpp's were read in its source, at the commit that is named.

    python -m scripts.golden_defaults
"""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import transformers

DEFAULTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "defaults.json"
SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 4096,
    "intermediate_size": 160,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}
"""More layers than `max_window_layers`, and as many heads as every family's default divides."""
FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "phi3": transformers.Phi3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}
NEVER_READ = {
    *("architectures", "attention_dropout", "chunk_size_feed_forward", "default_theta", "dtype"),
    *("embd_pdrop", "id2label", "initializer_range", "is_encoder_decoder", "label2id"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp"),
    *("problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef", "transformers_version"),
    *("use_cache", "rope_parameters", "layer_types", "mlp_only_layers"),
}
"""These do not change what a model computes, or are filled in by `made` below."""
LLAMA_CPP = {
    "file": "src/llama-model.cpp",
    "commit": "00342301d01add50835550e8a916f12097d94517",
    "all": {
        "attention.head_count_kv": "attention.head_count",
        "attention.key_length": "embedding_length / attention.head_count",
        "attention.value_length": "embedding_length / attention.head_count",
        "rope.dimension_count": "attention.key_length",
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": "rope.scale_linear, or 1 where that is 0 or missing",
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.original_context_length": "context_length",
        "output.weight": "token_embd.weight",
    },
    "gemma3": {
        "rope.freq_base_swa": 10000.0,
        "attention.sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    "phi3": {"attention.sliding_window": None},
}
"""Keys that a file may lack, without the architecture before them, and what they mean then. What is
missing here (`context_length`, `attention.layer_norm_rms_epsilon`, …) llama.cpp requires, too."""


def table() -> dict[str, Any]:
    """The content of the file."""
    return {
        "transformers": {
            "version": transformers.__version__,
            "sizes": SIZES,
            "families": {
                kind: {
                    "fields": _fields(family),
                    "made": _made(family()),
                    "windows": _made(family(**SIZES, **_with_windows(kind))),
                }
                for kind, family in FAMILIES.items()
            },
        },
        "llama.cpp": LLAMA_CPP,
    }


def _fields(family: Any) -> dict[str, Any]:
    """What the class says, before it derives one value from another."""
    common = {field.name for field in fields(transformers.PreTrainedConfig)}
    return {
        field.name: field.default
        for field in fields(family)
        if field.default is not MISSING
        and field.name not in NEVER_READ
        and (field.name not in common or field.name in family.__annotations__)
    }


def _with_windows(kind: str) -> dict[str, Any]:
    return {"use_sliding_window": True} if kind.startswith("qwen") else {}


def _made(config: Any) -> dict[str, Any]:
    """What it derives: the rotary embedding, and the kind of every layer."""
    said = config.to_dict()
    return {key: said.get(key) for key in ("rope_parameters", "sliding_window", "layer_types")}


def main() -> None:
    DEFAULTS.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
