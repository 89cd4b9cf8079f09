"""Tiny models of every family, from configs and tensor names that transformers itself wrote.

The weights are drawn from a seed, the same ones here and in `scripts/golden_families.py`, which has
transformers compute the tokens that are expected of them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny_model import write_tiny_llama

GOLDEN = Path(__file__).resolve().parents[3] / "data" / "golden_families.json"


def families() -> dict[str, Any]:
    """By name: config, shapes of the tensors, and cases of prompt and output."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))["families"]
    return found


def write_family(
    folder: Path, config: dict[str, Any], shapes: dict[str, list[int]], *, layers_gain: float = 1.0
) -> Path:
    """A Hugging Face folder with a byte tokenizer, whose weights are drawn anew; returns it.
    Layers add so much of what they would to each other as `layers_gain` says.
    """
    write_tiny_llama(folder)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    gemma = config["model_type"].startswith("gemma")
    tensors = {}
    for name in sorted(shapes):
        drawn = rng.standard_normal(shapes[name])
        if name.lower().endswith("norm.weight"):
            drawn = (1.5 if gemma else 1.0) + 0.2 * drawn
            if "layers" in name:
                drawn = (drawn + gemma) * layers_gain - gemma
        elif name.endswith(("embed_tokens.weight", "word_embeddings.weight")):
            drawn *= 0.08 if gemma else 1.0
        else:
            drawn *= 1.5 * shapes[name][-1] ** -0.5
        tensors[name] = drawn.astype(np.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
