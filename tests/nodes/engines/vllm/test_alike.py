"""Both engines answer a request alike: the same tokens, stops and limits. It can go on in either.

Both compute the same weights in float32, so that their logits differ in the last digits alone.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mesh.domain.ids import InstanceId
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import Engine
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.driving import Driver
from tests.contract.engine_contract import StoredModel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="the other engine is not installed"
)
PROMPT = tuple(range(5, 45))
FREE = SamplingParams(max_tokens=40, ignore_eos=True)
WAYS = {
    "greedy": FREE,
    "sampled": replace(FREE, temperature=0.9, seed=5),
    "nucleus": replace(FREE, temperature=1.2, seed=6, top_p=0.8),
    "top-k": replace(FREE, temperature=1.2, seed=7, top_k=5),
    "min-p": replace(FREE, temperature=1.2, seed=8, min_p=0.1),
    "whole vocabulary, with log-probabilities": replace(FREE, temperature=1.5, seed=9, logprobs=3),
    "by what is there": replace(FREE, presence_penalty=0.5, frequency_penalty=0.3),
    "penalised": replace(FREE, repetition_penalty=1.4),
    "sampled with penalty": replace(FREE, temperature=0.8, seed=2**63 - 1, repetition_penalty=1.2),
}


@pytest.fixture
def openvino() -> Iterator[Engine]:
    from mesh.domain.model import KvPrecision, WeightPrecision
    from mesh_nodes.engines.openvino.engine import OpenVinoEngine

    engine = OpenVinoEngine(threads=1, weights=WeightPrecision.F16, kv=KvPrecision.F32)
    yield engine
    engine.close()


def test_both_engines_answer_alike(
    engine: VllmEngine, openvino: Engine, model: StoredModel
) -> None:
    order = model.order(InstanceId("i"))
    here, there = Driver(engine, order), Driver(openvino, order)
    for way, sampling in WAYS.items():
        whole = here.run(way, PROMPT, sampling)
        assert there.run(way, PROMPT, sampling) == whole, way
        half = whole[:17]
        for name, driver in (("here", here), ("there", there)):
            moved = driver.submit(f"{way}, moved {name}", PROMPT, sampling, output=half)
            driver.finish()
            assert moved.tokens == whole[17:], way
    free = here.run("free", PROMPT, FREE)
    stopping = replace(FREE, ignore_eos=False)
    ends = []
    for driver in (here, there):
        stopped = driver.submit("stopped", PROMPT, stopping, stop_ids=(free[9],))
        driver.finish()
        ends.append((stopped.tokens, stopped.finish))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) <= 10
