"""The demo model's greedy tokens in float32 equal transformers', whatever happens around them."""

import pytest

from mesh.domain.steps import LoadTier
from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.engine_contract import mapped_spawner, vllm_spawner
from tests.nodes.engines.golden import check_golden
from tests.nodes.engines.serving import INSTANCE, load, request


@pytest.mark.parametrize("kv", ["elastic", "mapped"])
def test_tokens_equal_transformers(smollm2_model: StoredModel, kv: str) -> None:
    engine = VllmEngine(spawner=mapped_spawner() if kv == "mapped" else vllm_spawner())
    load(engine, smollm2_model.info, smollm2_model.path, context_tokens_max=512)
    check_golden(engine, seed=len(kv))
    engine.close()


def test_tokens_of_one_that_slept_twice_equal_transformers(smollm2_model: StoredModel) -> None:
    """Its KV cache is resized by copies."""
    engine = VllmEngine(spawner=vllm_spawner(), elastic=False, asleep_max=1)
    for tier in (LoadTier.DISK, LoadTier.HOST, LoadTier.HOST):
        if tier is LoadTier.HOST:
            engine.submit(INSTANCE, request("left behind", range(100)))
            engine.step(INSTANCE, 64)
            engine.unload(INSTANCE)
        loaded = load(engine, smollm2_model.info, smollm2_model.path, context_tokens_max=512)
        assert loaded.tier is tier
    check_golden(engine, seed=3)
    engine.close()
