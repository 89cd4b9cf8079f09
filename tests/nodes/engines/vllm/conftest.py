"""Without vLLM, only tests that do not need it are collected; one forkserver serves all of them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.engine_contract import StoredModel, vllm_spawner, write_tiny_model

WITHOUT_VLLM = (
    *("differences", "footprint", "host_pool", "killed", "releases", "sleep_slots"),
    *("spare_processes_alone", "spawner", "turn"),
)
collect_ignore = [
    path.name
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if not importlib.util.find_spec("vllm") and path.stem.removeprefix("test_") not in WITHOUT_VLLM
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    path = tmp_path_factory.mktemp("vllm") / "model"
    return StoredModel(info=write_tiny_model(path, head_size=32), path=path)


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    engine = VllmEngine(spawner=vllm_spawner())
    yield engine
    engine.close()
