"""Tiny models that embed or score, with what transformers computes of them.

Configs and tensor names are those that transformers wrote; `scripts/golden_embeddings.py` made the
expectation, of the weights that `families.write_family` draws.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mesh.domain.model import Task
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestTokens, SamplingParams
from mesh.runtime.engine import Engine
from mesh_loader.store import ModelStore, StoredModel
from tests.nodes.engines.openvino.families import write_family
from tests.nodes.engines.serving import INSTANCE, load, request

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


ONE = SamplingParams(max_tokens=1)
EMBED = [name for name, model in embedders().items() if model["pooling"] != "score"]
SCORE = [name for name in embedders() if name not in EMBED]


def imported(tmp_path: Path, folder: Path) -> StoredModel:
    return ModelStore(tmp_path / "store").import_model(f"file://{folder}")


def loaded(engine: Engine, tmp_path: Path, name: str, task: Task) -> None:
    stored = imported(tmp_path, write_embedder(tmp_path / "made", name))
    assert not stored.info.unfit_for(task)
    load(engine, stored.info.serving(task), stored.path)


def vectors(engine: Engine, *prompts: list[int], budget: int = 64) -> list[np.ndarray]:
    """The vectors of prompts that are submitted together."""
    for n, prompt in enumerate(prompts):
        engine.submit(INSTANCE, request(f"r{n}", prompt, ONE))
    found: dict[str, RequestTokens] = {}
    for _ in range(100):
        found |= {output.request_id: output for output in engine.step(INSTANCE, budget).outputs}
        if len(found) == len(prompts):
            break
    ends = {(output.finish, len(output.token_ids)) for output in found.values()}
    assert ends == {(FinishReason.LENGTH, 1)}
    return [np.array(found[f"r{n}"].embedding) for n in range(len(prompts))]


def cosines(found: list[np.ndarray], name: str) -> list[float]:
    cases = embedders()[name]["cases"]
    return [float(v @ np.array(case["vector"])) for v, case in zip(found, cases, strict=True)]
