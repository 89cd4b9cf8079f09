"""A process that was forked ahead serves the next load, and another takes its place."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from mesh.domain.ids import InstanceId
from mesh_nodes.engines.vllm import VllmEngine
from tests.contract.driving import Driver, greedy
from tests.contract.engine_contract import StoredModel, vllm_spawner
from tests.nodes.engines.vllm.test_ends import PROMPT, engine_processes
from tests.support.waiting import alive, until


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    engine = VllmEngine(spawner=vllm_spawner(), spare_max=1, asleep_max=1)
    engine.await_ready()
    assert engine._spare._waiting == []
    engine.fill_spare()
    until(lambda: len(engine._spare._waiting) == 1)
    yield engine
    engine.close()


def waiting(engine: VllmEngine) -> int:
    """The process that waits, once there is one and no other is coming."""
    until(lambda: engine._spare._coming is None and len(engine._spare._waiting) == 1)
    (remote,) = engine._spare._waiting
    return remote.pid


def test_loads_take_what_waits(engine: VllmEngine, model: StoredModel) -> None:
    before = engine_processes()
    pids, tokens = [waiting(engine)], []
    for name in ("a", "b"):
        driver = Driver(engine, model.order(InstanceId(name), kv_blocks=16))
        assert engine._instances[driver.instance_id].pid == pids[-1]
        tokens.append(driver.run("r", PROMPT, greedy(8)))
        pids.append(waiting(engine))
    assert tokens[0] == tokens[1]
    assert len(set(pids)) == 3
    assert engine_processes() - before == set(pids[1:])
    assert {*pids} <= engine_processes()


def test_a_wake_takes_nothing(engine: VllmEngine, model: StoredModel) -> None:
    order = model.order(InstanceId("a"), kv_blocks=16)
    Driver(engine, order)
    pid = waiting(engine)
    engine.unload(order.instance_id)
    Driver(engine, order)
    assert waiting(engine) == pid
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_one_that_was_killed_is_not_taken(engine: VllmEngine, model: StoredModel) -> None:
    pid = waiting(engine)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    driver = Driver(engine, model.order(InstanceId("a"), kv_blocks=16))
    assert len(driver.run("r", PROMPT, greedy(8))) == 8
    assert waiting(engine) != pid


def test_close_ends_what_waits_and_what_is_coming(model: StoredModel) -> None:
    before = engine_processes()
    engine = VllmEngine(spawner=vllm_spawner(), spare_max=2)
    engine.await_ready()
    engine.fill_spare()
    until(lambda: len(engine_processes() - before) == 2)
    engine.close()
    until(lambda: engine_processes() == before)
    engine._spare.fill()
    engine._spare.close()
    assert engine_processes() == before
