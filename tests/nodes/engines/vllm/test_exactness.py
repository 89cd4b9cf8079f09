"""The demo model's greedy tokens in float32 equal transformers', whatever happens around them."""

import pytest

from mesh.domain.steps import LoadTier
from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.engine_contract import vllm_spawner
from tests.nodes.engines.golden import check_golden
from tests.nodes.engines.serving import INSTANCE, load, request


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "copying"])
def test_tokens_equal_transformers(smollm2_model: StoredModel, elastic: bool) -> None:
    engine = VllmEngine(spawner=vllm_spawner(), elastic=elastic)
    load(engine, smollm2_model.info, smollm2_model.path, context_tokens_max=512)
    check_golden(engine, seed=1 + elastic)
    engine.close()


def test_tokens_of_one_that_slept_twice_equal_transformers(smollm2_model: StoredModel) -> None:
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
