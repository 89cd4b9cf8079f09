"""Models of one shape with weights of their own, as fine-tuned ones are: nothing is shared.

Each is a copy of the demo model in a store of its own, with its own id and its own prepared weights
on disk; what no node loads is linked. To mesh they are as unlike as any two models of a shape.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from bench.demo_model import stored_model
from mesh.domain.ids import ModelId
from mesh.domain.model import WeightPrecision
from mesh_loader.digests import write_index
from mesh_loader.prepared_key import openvino_key
from mesh_loader.source_index import SourceIndex
from mesh_nodes.engines.openvino.engine import OpenVinoEngine


def own_source(name: str) -> str:
    """Where the model of that name is said to come from."""
    return f"file:///of-its-own/{name}.gguf"


def plant_models(store: Path, names: Iterable[str], weights: WeightPrecision | None = None) -> None:
    """Put a model for each name into the store, prepared to be held so. Takes 135 MB of disk each,
    if it was not held otherwise before.

    Raises what `ModelStore.import_model` raises, for the demo model.
    """
    demo = stored_model()
    if weights is not None:
        OpenVinoEngine().prepare(demo.info.held_as(weights), demo.path, lambda phase, share: None)
    (store / "sources").mkdir(parents=True, exist_ok=True)
    index = SourceIndex(store / "sources")
    for name in names:
        source = own_source(name)
        model_id = ModelId(f"sha256-{sha256(source.encode()).hexdigest()[:16]}")
        folder = store / "models" / model_id
        shutil.copytree(demo.path, folder, copy_function=_placed, ignore=_unused(weights))
        said = folder / "model.json"
        info = json.loads(said.read_text())
        said.unlink()
        said.write_text(json.dumps(info | {"model_id": model_id}))
        write_index(folder)
        index.record(source, model_id, None, ())


def _unused(weights: WeightPrecision | None) -> Callable[[str, list[str]], list[str]]:
    """What was prepared to be held otherwise, too, which would take disk in each copy."""
    used = {openvino_key(held) for held in (WeightPrecision.I8, weights) if held is not None}

    def unused(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n not in used] if Path(folder).name == "prepared" else []

    return unused


def _placed(kept: str, copy: str) -> None:
    if "prepared" in Path(kept).parts:
        shutil.copyfile(kept, copy)
    else:
        os.link(kept, copy)
