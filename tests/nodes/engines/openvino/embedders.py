"""Tiny models that embed or score, with what transformers computes of them.

Configs and tensor names are those that transformers wrote; `scripts/golden_embeddings.py` made the
expectation, of the weights that `families.write_family` draws.
"""

import json
from pathlib import Path
from typing import Any

from tests.nodes.engines.openvino.families import write_family

GOLDEN = Path(__file__).resolve().parents[3] / "data" / "golden_embeddings.json"


def embedders() -> dict[str, Any]:
    """By name: config, shapes of the tensors, pooling, and cases of prompt and vector."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))["models"]
    return found


def write_embedder(folder: Path, name: str, *, normalised: bool = True, **changes: Any) -> Path:
    """A folder as sentence-transformers writes it; returns it. `changes` are of its config.json."""
    model = embedders()[name]
    write_family(folder, model["config"] | changes, model["shapes"])
    if model["pooling"] == "score":
        return folder
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules += [("Normalize", "2_Normalize")] * normalised
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": n,
                    "name": str(n),
                    "path": path,
                    "type": f"sentence_transformers.models.{kind}",
                }
                for n, (kind, path) in enumerate(modules)
            ]
        )
    )
    names = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    pooling = {f"pooling_mode_{one}": key == model["pooling"] for key, one in names.items()}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder
