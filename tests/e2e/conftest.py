"""A cell of real processes for each test, one shared store, and two tiny models."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live_cell import LiveCell
from tests.support.tiny_model import write_tiny_llama

NEED_VLLM = ["test_vllm_cells.py", "test_vllm_mixed.py"]
collect_ignore = [] if importlib.util.find_spec("vllm") else NEED_VLLM


@pytest.fixture(scope="session")
def store_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of all nodes: what one test imports, the next finds."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture
def cell(tmp_path: Path, store_home: Path) -> Iterator[LiveCell]:
    """A cell without processes yet; those that the test starts are gone when it ends."""
    cell = LiveCell(tmp_path, store_home)
    yield cell
    cell.close()
