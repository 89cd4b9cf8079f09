"""The scripted engine does what its script says; the contract suite checks everything else."""

from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.profile import IterationShape
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import EngineRequest, LoadOrder
from mesh.sim.sequences import answer_of
from tests.core.cells import MODEL
from tests.support.scripted_engine import KV_BLOCK_BYTES, WEIGHTS_BYTES, Script, ScriptedEngine

INSTANCE = InstanceId("i-1")
REQUEST = EngineRequest(
    request_id=RequestId("r"),
    prompt_tokens=(5, 6, 7),
    output_tokens=(),
    sampling=SamplingParams(max_tokens=4, ignore_eos=True),
    stop_token_ids=(),
)


def load(engine: ScriptedEngine, path: Path, *, kv_blocks: int = 8) -> None:
    order = LoadOrder(
        instance_id=INSTANCE,
        deployment=DeploymentName("d"),
        model=MODEL,
        model_path=path,
        kv_blocks=kv_blocks,
        context_tokens_max=128,
        batch_max=4,
    )
    engine.load(order, lambda phase, share: None)


def test_failures_are_spent_one_by_one_and_leave_the_engine_usable(tmp_path: Path) -> None:
    engine = ScriptedEngine(Script(fail_loads=1, out_of_memory_loads=1))
    with pytest.raises(EngineError, match="fails to load"):
        load(engine, tmp_path)
    with pytest.raises(OutOfMemory):
        load(engine, tmp_path)
    load(engine, tmp_path)
    engine.submit(INSTANCE, REQUEST)
    engine.script.fail_steps = 2
    for _ in range(2):
        with pytest.raises(EngineError, match="in a step"):
            engine.step(INSTANCE, 64)
    assert [output.first_index for output in engine.step(INSTANCE, 64).outputs] == [0]


def test_slow_calls_sleep_and_say_how_long(tmp_path: Path) -> None:
    slept: list[float] = []
    engine = ScriptedEngine(Script(load_s=0.5, step_s=0.02), sleep=slept.append)
    load(engine, tmp_path)
    assert engine.step(INSTANCE, 64).elapsed_s == 0.02
    assert slept == [0.5, 0.02]


def test_a_measure_takes_the_scripts_step_and_longer_the_larger_the_shape(tmp_path: Path) -> None:
    slept: list[float] = []
    engine = ScriptedEngine(Script(step_s=0.02), sleep=slept.append)
    load(engine, tmp_path)
    small = IterationShape(decode_batch=1, decode_context_tokens=8)
    large = IterationShape(decode_batch=2, decode_context_tokens=64)
    measured = [engine.measure(INSTANCE, shape) for shape in (small, small, large)]
    assert slept == [0.0, *measured]
    assert 0.02 < measured[0] == measured[1] < measured[2]
    engine.script.fail_measures = 1
    with pytest.raises(EngineError, match="not measured"):
        engine.measure(INSTANCE, small)
    assert engine.measure(INSTANCE, small) == measured[0]


def test_memory_is_bounded_over_all_instances(tmp_path: Path) -> None:
    engine = ScriptedEngine(memory_bytes=WEIGHTS_BYTES + 10 * KV_BLOCK_BYTES)
    with pytest.raises(OutOfMemory):
        load(engine, tmp_path, kv_blocks=11)
    load(engine, tmp_path, kv_blocks=8)
    assert engine.resize_kv(INSTANCE, 10).kv_blocks == 10
    with pytest.raises(OutOfMemory):
        engine.resize_kv(INSTANCE, 11)
    assert engine.memory()[0].kv_blocks == 10


def test_tokens_can_be_foretold(tmp_path: Path) -> None:
    """And are never the model's own stop tokens, so that no request ends by accident."""
    engine = ScriptedEngine()
    load(engine, tmp_path)
    engine.submit(INSTANCE, REQUEST)
    tokens: list[int] = []
    for _ in range(4):
        (output,) = engine.step(INSTANCE, 64).outputs
        tokens += output.token_ids
    assert tokens == list(answer_of(REQUEST.prompt_tokens, REQUEST.sampling, 4, MODEL))
