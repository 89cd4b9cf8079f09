"""A model in a folder, and a store that is empty."""

from pathlib import Path

import pytest

from mesh_loader.store import ModelStore
from tests.support.tiny_model import write_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")
