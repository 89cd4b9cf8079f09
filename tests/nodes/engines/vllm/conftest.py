"""Without vLLM, only tests that do not need it are collected; one forkserver serves all of them."""

import importlib.util
from collections.abc import Iterator

import pytest

from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.engine_contract import StoredModel, vllm_spawner, write_tiny_model

collect_ignore = (
    []
    if importlib.util.find_spec("vllm")
    else [
        "test_spare_processes.py",
        "test_alike.py",
        "test_as_is.py",
        "test_counting.py",
        "test_sampler.py",
        "test_ends.py",
        "test_exactness.py",
        "test_families.py",
        "test_gpu_scripts.py",
        "test_kv_mapped.py",
        "test_kv_memory.py",
        "test_sleeping.py",
        "test_parts.py",
        "test_weights.py",
        "test_weights_memory.py",
        "test_turns.py",
        "test_watch.py",
        "test_loader.py",
        "test_modules.py",
        "test_pooled_loads.py",
        "test_prefixes.py",
        "test_vectors.py",
    ]
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    path = tmp_path_factory.mktemp("vllm") / "model"
    return StoredModel(info=write_tiny_model(path, head_size=32), path=path)


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    engine = VllmEngine(spawner=vllm_spawner())
    yield engine
    engine.close()
