"""Greedy tokens of tiny models of every family as transformers computes them, for the OpenVINO
engine's test of families.

Run by hand from the repository's root, in an environment of its own (`pip install torch
transformers safetensors`); the result is kept in the tree, so that tests need neither library.

    python -m scripts.golden_families
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file

from scripts.golden_tokens import continued
from tests.nodes.engines.openvino.families import GOLDEN, write_family

OUTPUT_TOKENS = 32
PROMPT_TOKENS = (5, 30, 90)
"""Around a block's 32 tokens, and beyond every window."""
CLOSEST_MIN = 0.003
"""Between a token's logit and the next one's: beyond what another order of sums makes of it."""
SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"sliding_window": 24}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 48, **WINDOW}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.2 * pair for pair in range(12)],
    "long_factor": [1.5 + 2.0 * pair for pair in range(12)],
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
}
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "mistral": transformers.MistralConfig(**SIZES, **WINDOW),
    "phi3": transformers.Phi3Config(**SIZES, **WINDOW, partial_rotary_factor=0.75),
    "phi3-longrope": transformers.Phi3Config(
        **SIZES | {"max_position_embeddings": 1024},
        partial_rotary_factor=0.75,
        original_max_position_embeddings=256,
        rope_parameters=LONGROPE,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES, **GEMMA, layer_types=LAYERS, rope_parameters=ROPES
    ),
    "gemma2": transformers.Gemma2Config(**SIZES, **GEMMA, attn_logit_softcapping=None),
    "gemma2-capped": transformers.Gemma2Config(**SIZES, **GEMMA, attn_logit_softcapping=4.0),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SIZES, **MIXTURE, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **SIZES, **MIXTURE, shared_expert_intermediate_size=64
    ),
    "qwen2-window": transformers.Qwen2Config(
        **SIZES, **WINDOW, use_sliding_window=True, max_window_layers=2
    ),
}


def main() -> None:
    golden = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": "weights in f16, computed in float32",
        "families": {name: _family(name, config) for name, config in FAMILIES.items()},
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


def _family(name: str, config: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        saved, folder = Path(scratch) / "saved", Path(scratch) / "drawn"
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(saved)
        stored = load_file(saved / "model.safetensors")
        shapes = {key: list(tensor.shape) for key, tensor in stored.items()}
        written = json.loads((saved / "config.json").read_text())
        write_family(folder, written, shapes)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    model.generation_config.eos_token_id = None  # every case runs to its full length
    draw = random.Random(name)
    cases: list[dict[str, list[int]]] = []
    while len(cases) < len(PROMPT_TOKENS):
        prompt = [draw.randrange(2, 258) for _ in range(PROMPT_TOKENS[len(cases)])]
        output, closest = continued(model, prompt, OUTPUT_TOKENS)
        print(f"{name}: {len(set(output))} different tokens, closest call {closest:.4f}")
        if closest > CLOSEST_MIN:
            cases.append({"prompt": prompt, "output": output})
    return {"config": written, "shapes": shapes, "cases": cases}


if __name__ == "__main__":
    main()
