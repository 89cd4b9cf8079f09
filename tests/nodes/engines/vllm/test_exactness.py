"""The demo model's greedy tokens in float32 equal transformers', whatever happens around them."""

import pytest

from mesh_loader.store import StoredModel
from mesh_nodes.engines.vllm import VllmEngine
from tests.nodes.engines.golden import check_golden
from tests.nodes.engines.serving import load


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_equal_transformers(
    engine: VllmEngine, smollm2_model: StoredModel, seed: int
) -> None:
    load(engine, smollm2_model.info, smollm2_model.path, context_tokens_max=512)
    check_golden(engine, seed)
