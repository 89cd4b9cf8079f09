"""The demo model's greedy tokens equal transformers', whatever happens around them.

Weights and KV cache are f16, sums f32.
"""

from collections.abc import Iterator

import pytest

from mesh.domain.model import KvPrecision, WeightPrecision
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from tests.nodes.engines.golden import TOKENS, check_golden, golden
from tests.nodes.engines.serving import load


@pytest.fixture(scope="module")
def exact(smollm2_model: StoredModel) -> Iterator[OpenVinoEngine]:
    engine = OpenVinoEngine(threads=2, weights=WeightPrecision.F16, kv=KvPrecision.F16)
    load(engine, smollm2_model.info, smollm2_model.path, context_tokens_max=512)
    yield engine
    engine.close()


def test_the_expectation_is_what_it_should_be() -> None:
    requests, expected = golden()
    lengths = sorted(len(item.prompt_tokens) for item in requests.values())
    assert len(lengths) == 8
    assert lengths[0] < 10
    assert lengths[-1] > 300
    assert {len(tokens) for tokens in expected.values()} == {TOKENS}


def test_tokens_equal_transformers(exact: OpenVinoEngine) -> None:
    check_golden(exact, seed=1)
