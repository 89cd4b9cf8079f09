"""The demo model's greedy tokens equal transformers', whatever happens around them.

The expected tokens were made by `scripts/golden_tokens.py`. Weights and KV cache are f16, sums f32.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.domain.request import SamplingParams
from mesh.runtime.engine import EngineRequest
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino import KvPrecision, KvResize, OpenVinoEngine, WeightPrecision
from tests.nodes.engines.openvino.serving import INSTANCE, Outputs, load
from tests.nodes.engines.openvino.serving import request as engine_request

GOLDEN = Path(__file__).resolve().parents[3] / "data" / "golden_smollm2.json"
CHUNKS = (0, 7, 24, 64, 300)
"""Prefill budgets of a step: none, less than a block, more, and a whole prompt or two."""


RESIZES_A_STEP = 2


@pytest.fixture(scope="module", params=list(KvResize))
def exact(smollm2_model: StoredModel, request: pytest.FixtureRequest) -> Iterator[OpenVinoEngine]:
    engine = OpenVinoEngine(
        threads=2, weights=WeightPrecision.F16, kv=KvPrecision.F16, kv_resize=request.param
    )
    load(engine, smollm2_model.info, smollm2_model.path, context_tokens_max=512)
    yield engine
    engine.close()


def golden() -> tuple[dict[str, EngineRequest], dict[str, list[int]]]:
    """Requests and expected tokens of the eight cases."""
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    requests, expected = {}, {}
    for number, case in enumerate(cases):
        sampling = SamplingParams(max_tokens=len(case["output"]), ignore_eos=True)
        requests[f"r{number}"] = engine_request(f"r{number}", case["prompt"], sampling)
        expected[f"r{number}"] = case["output"]
    return requests, expected


def test_the_expectation_is_what_it_should_be() -> None:
    requests, expected = golden()
    lengths = sorted(len(item.prompt_tokens) for item in requests.values())
    assert len(lengths) == 8
    assert lengths[0] < 10
    assert lengths[-1] > 300
    assert {len(tokens) for tokens in expected.values()} == {48}


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_equal_transformers(exact: OpenVinoEngine, seed: int) -> None:
    """Under staggered joins and leaves, prefill chunks mixed with decodes, and random resizes."""
    rng = random.Random(seed)
    requests, expected = golden()
    waiting, outputs, resizes = list(requests), Outputs(), 0
    rng.shuffle(waiting)
    while len(outputs.finished) < len(requests):
        if waiting and rng.random() < 0.3:
            exact.submit(INSTANCE, requests[waiting.pop()])
        for _ in range(RESIZES_A_STEP):
            exact.resize_kv(INSTANCE, rng.randrange(1, 200))
            resizes += 1
        result = exact.step(INSTANCE, rng.choice(CHUNKS))
        outputs.take(result)
        if result.starved:
            exact.resize_kv(INSTANCE, result.kv_blocks_used + 4)
    assert resizes >= 100
    assert outputs.tokens == expected
    assert exact.memory()[0].kv_blocks_used == 0
