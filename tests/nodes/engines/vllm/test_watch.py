"""The end of an engine process is told at once and once, unless the engine itself ended it."""

import os
import queue
import signal

import psutil
import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.driving import Driver, no_progress
from tests.contract.engine_contract import StoredModel
from tests.nodes.engines.vllm.test_ends import PROMPT, engine_processes
from tests.support.waiting import until

TOLD_S_MAX = 1.0
A, B = InstanceId("a"), InstanceId("b")


class Told:
    """What the engine has told of."""

    def __init__(self, engine: VllmEngine) -> None:
        self._ends: queue.SimpleQueue[tuple[InstanceId, EngineError]] = queue.SimpleQueue()
        engine.watch(lambda instance_id, error: self._ends.put((instance_id, error)))

    def next(self) -> tuple[InstanceId, str]:
        instance_id, error = self._ends.get(timeout=TOLD_S_MAX)
        return instance_id, error.message

    def nothing(self) -> bool:
        return self._ends.empty()


@pytest.fixture
def told(engine: VllmEngine) -> Told:
    return Told(engine)


def process_of_load(engine: VllmEngine, model: StoredModel, instance_id: InstanceId) -> int:
    before = engine_processes()
    engine.load(model.order(instance_id, kv_blocks=16), no_progress)
    (pid,) = engine_processes() - before
    return pid


def test_killed_while_idle(engine: VllmEngine, model: StoredModel, told: Told) -> None:
    pid = process_of_load(engine, model, A)
    bystander = Driver(engine, model.order(B, kv_blocks=16))
    os.kill(pid, signal.SIGKILL)
    assert told.next() == (A, "the engine process of a has ended (signal 9)")
    assert [books.instance_id for books in engine.memory()] == [B]
    assert not psutil.pid_exists(pid), "it is reaped"
    with pytest.raises(EngineError, match="has ended"):
        engine.step(A, 64)
    engine.unload(A)
    assert len(bystander.run("r", PROMPT)) > 0
    assert told.nothing()


def test_one_that_breaks_by_itself_says_why(
    engine: VllmEngine, model: StoredModel, told: Told
) -> None:
    process_of_load(engine, model, A)
    wrong = EngineRequest(
        request_id=RequestId("wrong"),
        prompt_tokens=(5, "no token", 7),  # type: ignore[arg-type]
        sampling=SamplingParams(),
    )
    engine.submit(A, wrong)
    with pytest.raises(EngineError):
        engine.step(A, 64)
    instance_id, message = told.next()
    assert instance_id == A
    assert "vLLM failed: TypeError" in message


def test_what_the_engine_ends_is_told_to_nobody(
    engine: VllmEngine, model: StoredModel, told: Told
) -> None:
    """An unload, a load that fails, the engine's own end."""
    before = engine_processes()
    process_of_load(engine, model, A)
    engine.unload(A)
    with pytest.raises(EngineError):
        engine.load(model.order(A, kv_blocks=0), no_progress)
    process_of_load(engine, model, A)
    engine.close()
    until(lambda: engine_processes() == before)
    assert told.nothing()
