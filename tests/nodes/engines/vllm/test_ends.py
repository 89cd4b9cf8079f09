"""However an engine process ends, its instance is gone, its memory is free, and others go on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import EngineRequest
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.driving import Driver, greedy, no_progress
from tests.contract.engine_contract import StoredModel
from tests.support.waiting import alive, until

WAIT_S_MAX = 60.0
PROMPT = tuple(range(5, 45))


def engine_processes() -> set[int]:
    """Those of this test process: what its forkserver has forked."""
    forkservers = psutil.Process().children()
    return {
        child.pid
        for forkserver in forkservers
        for child in forkserver.children()
        if alive(child.pid)
    }


def outcome_of(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """The call in a thread of its own, and where its result or its error will be."""
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcomes


@pytest.fixture
def pair(engine: VllmEngine, model: StoredModel) -> tuple[Driver, Driver, int]:
    """A bystander, a victim that decodes, and the victim's process."""
    bystander = Driver(engine, model.order(InstanceId("bystander"), kv_blocks=16))
    before = engine_processes()
    victim = Driver(engine, model.order(InstanceId("victim"), kv_blocks=16))
    (pid,) = engine_processes() - before
    for driver in (bystander, victim):
        driver.submit("r", PROMPT, greedy(12))
        driver.step()
    return bystander, victim, pid


def check_gone(
    engine: VllmEngine, bystander: Driver, pid: int, model: StoredModel, *, loaded: bool = True
) -> None:
    """The victim is, wholly; the bystander finishes; the victim's id loads afresh."""
    words = "the engine process of victim has ended" if loaded else "victim is not loaded"
    assert [books.instance_id for books in engine.memory()] == ["bystander"]
    assert not alive(pid)
    with pytest.raises(EngineError, match=words):
        engine.step(InstanceId("victim"), 64)
    engine.abort(InstanceId("victim"), RequestId("r"))
    engine.unload(InstanceId("victim"))
    again = Driver(engine, model.order(InstanceId("victim"), kv_blocks=16))
    tokens = again.run("r", PROMPT, greedy(12))
    bystander.finish()
    assert bystander.ended[RequestId("r")].tokens == tokens


def test_killed_amid_an_iteration(
    engine: VllmEngine, model: StoredModel, pair: tuple[Driver, Driver, int]
) -> None:
    bystander, victim, pid = pair
    told: list[InstanceId] = []
    engine.watch(lambda instance_id, error: told.append(instance_id))
    os.kill(pid, signal.SIGSTOP)
    thread, outcomes = outcome_of(lambda: engine.step(victim.instance_id, 64))
    time.sleep(0.2)
    assert thread.is_alive()
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S_MAX)
    (error,) = outcomes
    assert isinstance(error, EngineError)
    assert "victim ended amid a step (signal 9)" in error.message
    until(lambda: told == ["victim"])
    check_gone(engine, bystander, pid, model)


def test_killed_between_iterations(
    engine: VllmEngine, model: StoredModel, pair: tuple[Driver, Driver, int]
) -> None:
    """The books know at once. Requests are taken, and the next step says so."""
    bystander, victim, pid = pair
    os.kill(pid, signal.SIGKILL)
    until(lambda: len(engine.memory()) == 1)
    for name in ("late", "later"):
        victim.submit(name, PROMPT)
    with pytest.raises(EngineError, match=r"victim has ended \(signal 9\)"):
        engine.step(victim.instance_id, 64)
    check_gone(engine, bystander, pid, model)


def test_killed_amid_a_load(engine: VllmEngine, model: StoredModel) -> None:
    bystander = Driver(engine, model.order(InstanceId("bystander"), kv_blocks=16))
    bystander.submit("r", PROMPT, greedy(12))
    before = engine_processes()
    order = model.order(InstanceId("victim"), kv_blocks=16)
    thread, outcomes = outcome_of(lambda: engine.load(order, no_progress))
    until(lambda: len(engine_processes() - before) == 1)
    (pid,) = engine_processes() - before
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S_MAX)
    (error,) = outcomes
    assert isinstance(error, EngineError)
    assert "victim ended amid a load (signal 9)" in error.message
    check_gone(engine, bystander, pid, model, loaded=False)


def test_a_failure_that_nobody_expected_ends_the_process(
    engine: VllmEngine, model: StoredModel, pair: tuple[Driver, Driver, int]
) -> None:
    """vLLM is in no known state after one."""
    bystander, victim, pid = pair
    wrong = EngineRequest(
        request_id=RequestId("wrong"),
        prompt_tokens=(5, "no token", 7),  # type: ignore[arg-type]
        sampling=SamplingParams(),
    )
    engine.submit(victim.instance_id, wrong)
    with pytest.raises(EngineError, match=r"victim has ended .*: vLLM failed: TypeError"):
        engine.step(victim.instance_id, 64)
    check_gone(engine, bystander, pid, model)


def test_a_killed_forkserver_takes_every_instance_and_the_next_load_brings_another(
    engine: VllmEngine, model: StoredModel
) -> None:
    driver = Driver(engine, model.order(InstanceId("i"), kv_blocks=16))
    tokens = driver.run("alone", PROMPT, greedy(4))
    told: list[InstanceId] = []
    engine.watch(lambda instance_id, error: told.append(instance_id))
    (forkserver,) = (p for p in psutil.Process().children() if p.children())
    forkserver.kill()
    until(lambda: engine.memory() == ())
    until(lambda: told == ["i"])
    with pytest.raises(EngineError, match="the engine process of i"):
        engine.step(driver.instance_id, 64)
    engine.unload(driver.instance_id)
    again = Driver(engine, model.order(InstanceId("i"), kv_blocks=16))
    assert again.run("r", PROMPT, greedy(4)) == tokens


def test_an_unload_leaves_no_process(engine: VllmEngine, model: StoredModel) -> None:
    before = engine_processes()
    driver = Driver(engine, model.order(InstanceId("i"), kv_blocks=4))
    assert len(engine_processes() - before) == 1
    engine.unload(driver.instance_id)
    assert engine_processes() == before


def test_close_ends_a_load_that_is_under_way(engine: VllmEngine, model: StoredModel) -> None:
    before = engine_processes()
    order = model.order(InstanceId("i"), kv_blocks=4)
    thread, outcomes = outcome_of(lambda: engine.load(order, no_progress))
    until(lambda: len(engine_processes() - before) == 1)
    engine.close()
    thread.join(WAIT_S_MAX)
    assert isinstance(outcomes[0], EngineError)
    until(lambda: engine_processes() == before)


AGENT = """
import sys, time
from pathlib import Path
from mesh.domain.ids import InstanceId
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.engine_contract import StoredModel, write_tiny_model
path = Path(sys.argv[1])
model = StoredModel(info=write_tiny_model(path, head_size=32), path=path)
engine = VllmEngine(threads=1, asleep_max=1)
for name in ("loaded", "asleep"):
    engine.load(model.order(InstanceId(name), kv_blocks=4), lambda phase, share: None)
engine.unload(InstanceId("asleep"))
assert len(engine.asleep()) == 1
print("ready", flush=True)
time.sleep(600)
"""


def test_no_process_outlives_an_agent_that_is_killed(tmp_path: object) -> None:
    """Neither one whose instance is loaded nor one that sleeps."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, f"{tmp_path}/model"], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    with agent, agent.stdout:
        assert agent.stdout.readline() == "ready\n"
        below = psutil.Process(agent.pid).children(recursive=True)
        assert len(below) == 3, "the forkserver and two engine processes"
        agent.kill()
    until(lambda: not any(alive(process.pid) for process in below))
