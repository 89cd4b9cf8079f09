"""Unloaded instances sleep and wake with the same tokens; what fails on the way leaves no trace."""

import os
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import LoadTier
from mesh_nodes.engines.vllm import VllmEngine, sleeping
from mesh_nodes.engines.vllm.host_pool import CHUNK_BYTES
from tests.contract.driving import Driver, greedy, no_progress
from tests.contract.engine_contract import StoredModel, vllm_spawner
from tests.nodes.engines.vllm.test_ends import PROMPT, WAIT_S_MAX, engine_processes, outcome_of
from tests.support.waiting import alive, until

DRAWN = SamplingParams(
    max_tokens=12, ignore_eos=True, temperature=0.9, repetition_penalty=1.2, seed=3
)
ONE, TWO, THREE = InstanceId("one"), InstanceId("two"), InstanceId("three")
Make = Callable[..., VllmEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes an engine on which two may sleep, unless told otherwise."""
    made = []

    def make(asleep_max: int = 2, **options: object) -> VllmEngine:
        engine = VllmEngine(
            spawner=vllm_spawner(),
            asleep_max=asleep_max,
            **options,  # type: ignore[arg-type]
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make: Make) -> VllmEngine:
    return make()


@pytest.fixture
def other(model: StoredModel, tmp_path: Path) -> StoredModel:
    """Another model to all who look at its folder."""
    return replace(model, path=shutil.copytree(model.path, tmp_path / "other"))


def started(engine: VllmEngine, model: StoredModel, name: InstanceId, **limits: int) -> int:
    """Load an instance; the process that was started for it."""
    before = engine_processes()
    engine.load(model.order(name, kv_blocks=16, **limits), no_progress)
    (pid,) = engine_processes() - before
    return pid


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "copying"])
def test_tokens_are_the_same_after_every_wake(
    make: Make, model: StoredModel, elastic: bool
) -> None:
    """Under another id, with another KV cache, and nothing of the requests that were left."""
    engine, tokens, before = make(elastic=elastic), [], engine_processes()
    for number, (blocks, tier) in enumerate(
        [(16, LoadTier.DISK), (40, LoadTier.HOST), (9, LoadTier.HOST), (16, LoadTier.HOST)]
    ):
        driver = Driver(engine, model.order(InstanceId(f"i{number}"), kv_blocks=blocks))
        assert driver.loaded.tier is tier
        assert (driver.books.kv_blocks, driver.books.kv_blocks_used) == (blocks, 0)
        tokens.append((driver.run("a", PROMPT), driver.run("b", PROMPT, DRAWN)))
        driver.resize(12)
        for name in ("left", "behind"):
            driver.submit(name, PROMPT, greedy(30))
            driver.step()
        engine.unload(driver.instance_id)
        assert engine.memory() == ()
        (asleep,) = engine.asleep()
        assert (asleep.model_id, asleep.context_tokens_max) == (model.info.model_id, 256)
        assert len(engine_processes() - before) == 1
    assert tokens == tokens[:1] * 4


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "copying"])
def test_what_was_cached_is_gone_after_a_sleep_and_nobody_is_told_otherwise(
    make: Make, model: StoredModel, elastic: bool
) -> None:
    engine = make(elastic=elastic)
    tokens = []
    for name in (ONE, TWO):
        driver = Driver(engine, model.order(name, kv_blocks=16))
        assert driver.loaded.tier is (LoadTier.DISK if name == ONE else LoadTier.HOST)
        assert not engine.tell_prefixes()
        running = driver.submit("r", PROMPT * 3, greedy(4), salt="tenant")
        told = driver.step(256).prefixes
        driver.finish()
        assert (running.found, running.adopted) == (0, 0)
        cached = driver.books.kv_blocks_cached
        assert told is not None
        assert (len(told.came), told.went) == (cached, ())
        assert cached > 1
        tokens.append(running.tokens)
        # Something that has not been told when it falls asleep.
        engine.resize_kv(name, 1)
        engine.unload(name)
    assert tokens[0] == tokens[1]


def test_a_sleep_takes_the_weights_off_the_device(engine: VllmEngine, model: StoredModel) -> None:
    """As many bytes as the parameters have, and those of the rotary embedding."""
    engine.load(model.order(ONE, kv_blocks=16), no_progress)
    loaded = engine._slots[ONE].loaded
    weights_bytes = sum(loaded.layout.sizes_bytes)
    assert 0 < weights_bytes - 4 * model.info.parameters < 2**20
    assert 0 < loaded.beside_bytes < 2**20
    engine.unload(ONE)
    assert len(engine.asleep()) == 1


def test_only_what_has_the_same_limits_is_woken(engine: VllmEngine, model: StoredModel) -> None:
    """Others take the weights that stand there."""
    pid = started(engine, model, ONE)
    engine.unload(ONE)
    for limits in ({"batch_max": 7}, {"context_tokens_max": 200}, {"kv_blocks": 4096 + 1}):
        before = engine_processes()
        loaded = engine.load(model.order(TWO, **limits), no_progress)
        assert loaded.tier is LoadTier.HOST
        assert len(engine_processes() - before) == 1
        assert alive(pid) == ("kv_blocks" not in limits), "its addresses do not do for those"
        engine._slots.pop(TWO)
        engine.unload(TWO)


def test_the_one_asleep_the_longest_goes_first(engine: VllmEngine, model: StoredModel) -> None:
    pids = [
        started(engine, model, name, batch_max=n) for n, name in ((1, ONE), (2, TWO), (3, THREE))
    ]
    engine.unload(ONE)
    engine.unload(TWO)
    engine.load(model.order(ONE, kv_blocks=16, batch_max=1), no_progress)
    engine.unload(ONE)
    assert [alive(pid) for pid in pids] == [True, True, True]
    engine.unload(THREE)
    assert [alive(pid) for pid in pids] == [True, False, True]
    assert len(engine.asleep()) == 2


@pytest.mark.parametrize(("chunks", "asleep"), [(1, 0), (2, 1), (3, 2)])
def test_the_hosts_memory_is_a_bound(
    make: Make, model: StoredModel, other: StoredModel, chunks: int, asleep: int
) -> None:
    """Each takes a chunk for its parameters, and some bytes for its buffers."""
    engine = make(asleep_bytes_max=chunks * CHUNK_BYTES)
    pids = [started(engine, stored, name) for stored, name in ((model, ONE), (other, TWO))]
    for name in (ONE, TWO):
        engine.unload(name)
    assert len(engine.asleep()) == asleep
    assert [alive(pid) for pid in pids] == [asleep == 2, asleep > 0]


def test_what_is_awake_keeps_what_it_has_there(
    make: Make, model: StoredModel, other: StoredModel
) -> None:
    """It sleeps again in that place, and nothing else does."""
    engine = make(asleep_bytes_max=int(1.5 * CHUNK_BYTES))
    one, two = (started(engine, stored, name) for stored, name in ((model, ONE), (other, TWO)))
    engine.unload(ONE)
    assert engine.load(model.order(ONE), no_progress).tier is LoadTier.HOST
    engine.unload(TWO)
    assert (engine.asleep(), alive(two)) == ((), False)
    engine.unload(ONE)
    assert (len(engine.asleep()), alive(one)) == (1, True)
    assert engine.load(model.order(ONE), no_progress).tier is LoadTier.HOST
    os.kill(one, signal.SIGKILL)
    until(lambda: not alive(one))
    engine.unload(ONE)
    engine.load(other.order(TWO), no_progress)
    engine.unload(TWO)
    assert len(engine.asleep()) == 1, "nobody holds the other's any more"
    assert [key.model_path for key in engine._pooled()] == [other.path]


def test_what_sleeps_goes_before_a_load_lacks_memory(make: Make, model: StoredModel) -> None:
    held: list[int] = []
    engine = make(available_bytes=lambda: 1 << 50 if not any(map(alive, held)) else 0)
    held.append(started(engine, model, ONE))
    engine.unload(ONE)
    assert len(engine.asleep()) == 1
    engine.load(model.order(TWO, batch_max=3), no_progress)
    assert engine.asleep() == ()
    assert not alive(held[0])


def test_one_that_is_swapped_out_can_fall_asleep_and_wake(
    engine: VllmEngine, model: StoredModel
) -> None:
    driver = Driver(engine, model.order(ONE, kv_blocks=16))
    alone = driver.run("alone", PROMPT)
    driver.submit("left", PROMPT)
    driver.step()
    driver.swap(False)
    engine.unload(ONE)
    assert len(engine.asleep()) == 1
    woken = Driver(engine, model.order(TWO, kv_blocks=16))
    assert woken.loaded.tier is LoadTier.HOST
    assert woken.run("r", PROMPT) == alone
    engine.unload(TWO)
    still_out = Driver(engine, replace(model.order(ONE, kv_blocks=16), swapped=True))
    assert still_out.loaded.tier is LoadTier.HOST
    still_out.swap(True)
    assert still_out.run("r", PROMPT) == alone


def test_one_that_cannot_come_back_may_try_again(make: Make, model: StoredModel) -> None:
    available = [1 << 50]
    engine = make(available_bytes=lambda: available[0])
    driver = Driver(engine, model.order(ONE, kv_blocks=16))
    alone = driver.run("alone", PROMPT)
    running = driver.submit("r", PROMPT)
    driver.step(16)
    driver.swap(False)
    available[0] = 0
    with pytest.raises(OutOfMemory):
        engine.swap(ONE, True)
    driver.check_books()
    available[0] = 1 << 50
    driver.swap(True)
    driver.finish()
    assert running.tokens == alone


def test_without_a_place_in_the_pool_an_instance_stays(make: Make, model: StoredModel) -> None:
    """Where nothing sleeps there is none at all."""
    for engine, kind in (
        (make(asleep_bytes_max=CHUNK_BYTES // 2), OutOfMemory),
        (make(asleep_max=0), EngineError),
    ):
        driver = Driver(engine, model.order(ONE, kv_blocks=16))
        driver.submit("r", PROMPT)
        with pytest.raises(kind):
            engine.swap(ONE, False)
        driver.finish()


def test_killed_amid_a_swap(engine: VllmEngine, model: StoredModel) -> None:
    """The swap fails, and others step meanwhile."""
    bystander = Driver(engine, model.order(TWO, kv_blocks=16))
    pid = started(engine, model, ONE)
    engine.swap(ONE, False)
    os.kill(pid, signal.SIGSTOP)
    thread, outcomes = outcome_of(lambda: engine.swap(ONE, True))
    assert len(bystander.run("r", PROMPT)) == 12
    assert thread.is_alive()
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S_MAX)
    assert isinstance(outcomes[0], EngineError)
    assert [books.instance_id for books in engine.memory()] == [TWO]
    engine.unload(ONE)
    assert len(Driver(engine, model.order(ONE, kv_blocks=16)).run("r", PROMPT)) == 12


def test_killed_amid_a_sleep(engine: VllmEngine, model: StoredModel) -> None:
    bystander = Driver(engine, model.order(TWO, kv_blocks=16))
    running = bystander.submit("r", PROMPT, greedy(12))
    pid = started(engine, model, ONE)
    os.kill(pid, signal.SIGSTOP)
    thread, outcomes = outcome_of(lambda: engine.unload(ONE))
    bystander.step()
    assert thread.is_alive()
    assert [books.instance_id for books in engine.memory()] == [TWO]
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S_MAX)
    assert outcomes == [None]
    assert not alive(pid)
    assert engine.asleep() == ()
    again = Driver(engine, model.order(ONE, kv_blocks=16))
    bystander.finish()
    assert again.run("r", PROMPT, greedy(12)) == running.tokens


def test_killed_amid_a_wake(engine: VllmEngine, model: StoredModel) -> None:
    """The load goes on in another process, with the weights that stand there."""
    pid = started(engine, model, ONE)
    engine.unload(ONE)
    os.kill(pid, signal.SIGSTOP)
    thread, outcomes = outcome_of(lambda: Driver(engine, model.order(TWO, kv_blocks=16)))
    time.sleep(0.2)
    assert thread.is_alive()
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S_MAX)
    (driver,) = outcomes
    assert isinstance(driver, Driver), driver
    assert (driver.loaded.tier, driver.instance_id) == (LoadTier.HOST, TWO)
    assert len(driver.run("r", PROMPT)) == 12
    assert not alive(pid)


def test_killed_in_its_sleep(engine: VllmEngine, model: StoredModel) -> None:
    pid = started(engine, model, ONE)
    engine.unload(ONE)
    os.kill(pid, signal.SIGKILL)
    until(lambda: engine.asleep() == ())
    before = engine_processes()
    assert engine.load(model.order(ONE), no_progress).tier is LoadTier.HOST
    assert len(engine_processes() - before) == 1


def test_a_sleep_that_does_not_end_is_an_unload(
    engine: VllmEngine, model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleeping, "MOVE_S_MAX", 0.2)
    pid = started(engine, model, ONE)
    os.kill(pid, signal.SIGSTOP)
    engine.unload(ONE)
    assert not alive(pid)
    assert engine.asleep() == ()


def test_one_moves_at_a_time_and_steps_go_on_beside(engine: VllmEngine, model: StoredModel) -> None:
    bystander = Driver(engine, model.order(THREE, kv_blocks=16))
    until(lambda: bool(engine.in_host_memory()))
    first = started(engine, model, ONE, batch_max=1)
    second = started(engine, model, TWO, batch_max=2)
    engine.unload(TWO)
    os.kill(first, signal.SIGSTOP)
    sleeper, slept = outcome_of(lambda: engine.unload(ONE))
    time.sleep(0.1)
    waker, woken = outcome_of(
        lambda: engine.load(model.order(TWO, kv_blocks=16, batch_max=2), no_progress).tier
    )
    assert len(bystander.run("r", PROMPT)) == 12
    assert sleeper.is_alive()
    assert waker.is_alive(), "it waits for the sleep"
    os.kill(first, signal.SIGCONT)
    for thread in (sleeper, waker):
        thread.join(WAIT_S_MAX)
    assert (slept, woken) == ([None], [LoadTier.HOST])
    assert alive(first)
    assert alive(second)
    assert len(engine.asleep()) == 1


@pytest.mark.parametrize("waking", [False, True], ids=["a sleep", "a wake"])
def test_close_ends_what_moves(engine: VllmEngine, model: StoredModel, waking: bool) -> None:
    pid = started(engine, model, ONE)
    if waking:
        engine.unload(ONE)
    os.kill(pid, signal.SIGSTOP)
    call = (
        (lambda: engine.load(model.order(TWO), no_progress))
        if waking
        else (lambda: engine.unload(ONE))
    )
    thread, outcomes = outcome_of(call)
    time.sleep(0.2)
    engine.close()
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
    assert not alive(pid)
    assert engine.asleep() == ()
    assert waking == isinstance(outcomes[0], Exception), "a load cannot be made any more"


def test_close_ends_what_sleeps(engine: VllmEngine, model: StoredModel) -> None:
    pid = started(engine, model, ONE)
    engine.unload(ONE)
    engine.close()
    assert not alive(pid)


def test_nothing_sleeps_unless_it_is_asked_for(make: Make, model: StoredModel) -> None:
    engine = make(asleep_max=0)
    pid = started(engine, model, ONE)
    engine.unload(ONE)
    assert not alive(pid)
    engine.abort(ONE, RequestId("r"))


def test_the_end_of_one_that_was_woken_is_told_and_of_one_that_sleeps_is_not(
    engine: VllmEngine, model: StoredModel
) -> None:
    ends: queue.SimpleQueue[InstanceId] = queue.SimpleQueue()
    engine.watch(lambda instance_id, error: ends.put(instance_id))
    for sleeps in (False, True):
        pid = started(engine, model, ONE)
        engine.unload(ONE)
        engine.load(model.order(TWO, kv_blocks=16), no_progress)
        if sleeps:
            engine.unload(TWO)
        os.kill(pid, signal.SIGKILL)
        if sleeps:
            until(lambda: engine.asleep() == ())
        else:
            assert ends.get(timeout=WAIT_S_MAX) == TWO
            engine.unload(TWO)
    started(engine, model, THREE)
    assert ends.empty()
