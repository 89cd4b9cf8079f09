"""The demo model's greedy tokens in float32 equal transformers', whatever happens around them."""

import pytest

from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.engine_contract import vllm_spawner
from tests.nodes.engines.golden import check_golden
from tests.nodes.engines.serving import load


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "copying"])
def test_tokens_equal_transformers(smollm2_model: StoredModel, elastic: bool) -> None:
    engine = VllmEngine(spawner=vllm_spawner(), elastic=elastic)
    load(engine, smollm2_model.info, smollm2_model.path, context_tokens_max=512)
    check_golden(engine, seed=1 + elastic)
    engine.close()
