"""Greedy tokens of the demo model as transformers computes them, and the run that must yield them.

The expected tokens were made by `scripts/golden_tokens.py`.
"""

import json
import random
from pathlib import Path

from mesh.domain.request import SamplingParams
from mesh.runtime.engine import Engine, EngineRequest
from tests.nodes.engines.serving import INSTANCE, Outputs
from tests.nodes.engines.serving import request as engine_request
from tests.support.depth import DEEP

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden_smollm2.json"
CHUNKS = (0, 7, 24, 64, 300)
"""Prefill budgets of a step: none, less than a block, more, and a whole prompt or two."""
RESIZES_A_STEP = 2
TOKENS = 48 if DEEP else 32
"""So many of each answer are compared; the file has 48."""


def golden() -> tuple[dict[str, EngineRequest], dict[str, list[int]]]:
    """Requests and expected tokens of the eight cases."""
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    requests, expected = {}, {}
    for number, case in enumerate(cases):
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        requests[f"r{number}"] = engine_request(f"r{number}", case["prompt"], sampling)
        expected[f"r{number}"] = case["output"][:TOKENS]
    return requests, expected


def check_golden(engine: Engine, seed: int) -> None:
    """All of them come, under staggered joins and leaves, prefill chunks mixed with decodes, and
    random resizes. The engine has the demo model loaded as INSTANCE.
    """
    rng = random.Random(seed)
    requests, expected = golden()
    waiting, outputs, resizes = list(requests), Outputs(), 0
    rng.shuffle(waiting)
    while len(outputs.finished) < len(requests):
        if waiting and rng.random() < 0.3:
            engine.submit(INSTANCE, requests[waiting.pop()])
        for _ in range(RESIZES_A_STEP):
            engine.resize_kv(INSTANCE, rng.randrange(1, 200))
            resizes += 1
        result = engine.step(INSTANCE, rng.choice(CHUNKS))
        outputs.take(result)
        if result.starved:
            engine.resize_kv(INSTANCE, result.kv_blocks_used + 4)
    assert resizes >= 100
    assert outputs.tokens == expected
    assert engine.memory()[0].kv_blocks_used == 0
