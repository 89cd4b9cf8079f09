"""First loads from the node's pool of weights: their tokens, and what goes wrong."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mesh.domain.ids import InstanceId
from mesh.domain.request import SamplingParams
from mesh.domain.steps import HeldModel, LoadTier
from mesh_loader.digests import Verify
from mesh_loader.store import ModelStore
from mesh_nodes.engines.vllm import VllmEngine
from mesh_nodes.engines.vllm.host_pool import CHUNK_BYTES
from tests.contract.driving import Driver
from tests.contract.engine_contract import StoredModel, vllm_spawner, write_tiny_model
from tests.nodes.engines.openvino.families import families, write_family
from tests.nodes.engines.serving import INSTANCE, load, request, run
from tests.nodes.engines.vllm.test_ends import PROMPT, WAIT_S_MAX, engine_processes, outcome_of
from tests.nodes.engines.vllm.test_families import quantise
from tests.nodes.engines.vllm.test_sleeping import started
from tests.support.waiting import alive, until

ONE, TWO = InstanceId("one"), InstanceId("two")
Make = Callable[..., VllmEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def make(**options: object) -> VllmEngine:
        given = {"asleep_max": 1, "verify": Verify.NEVER, **options}
        engine = VllmEngine(spawner=vllm_spawner(), **given)  # type: ignore[arg-type]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def stored(tmp_path: Path) -> StoredModel:
    path = tmp_path / "model"
    return StoredModel(info=write_tiny_model(path, head_size=32), path=path)


def serve(engine: VllmEngine, stored: StoredModel, name: InstanceId = ONE) -> Driver:
    return Driver(engine, stored.order(name, kv_blocks=16))


def left_by(engine: VllmEngine, stored: StoredModel) -> list[int]:
    """Tokens of a process that has left its weights in the pool, and has been killed."""
    before = engine_processes()
    tokens = serve(engine, stored).run("r", PROMPT)
    (pid,) = engine_processes() - before
    until(lambda: bool(engine.in_host_memory()))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    engine.unload(ONE)
    assert engine.asleep() == ()
    return tokens


def zero_files(stored: StoredModel) -> None:
    """Nothing but the names of tensors is right in them from now on."""
    file = stored.path / "model.safetensors"
    save_file({name: 0 * tensor for name, tensor in load_file(file).items()}, file)


def test_what_one_process_has_left_another_computes_with_and_reads_no_file(
    make: Make, stored: StoredModel
) -> None:
    """The one was killed in its work. Limits are of no account; what was loaded so sleeps, too."""
    engine = make()
    assert engine.tier_of(stored.order(ONE)) is LoadTier.DISK
    tokens = left_by(engine, stored)
    assert engine.tier_of(stored.order(TWO)) is LoadTier.HOST
    held = HeldModel(model_id=stored.info.model_id, tier=LoadTier.HOST, context_tokens_max=0)
    assert engine.in_host_memory() == (held,)
    zero_files(stored)
    used_bytes = engine._pool.used_bytes  # type: ignore[union-attr]
    for limits in ({}, {"batch_max": 3}, {"context_tokens_max": 128}):
        order = stored.order(TWO, kv_blocks=16, **limits)
        for _ in range(2):
            driver = Driver(engine, order)
            assert driver.loaded.tier is LoadTier.HOST
            assert driver.run("r", PROMPT) == tokens
            engine.unload(TWO)
            assert len(engine.asleep()) == 1
        assert engine._pool.used_bytes < used_bytes + 2**20, "it stands there once"  # type: ignore[union-attr]


def switched(engine: VllmEngine, folder: Path, tmp_path: Path) -> list[LoadTier]:
    """Tiers of three loads, each in a process of its own, which give the same tokens."""
    stored = ModelStore(tmp_path / "store").import_model(f"file://{folder}")
    asked = request("r", range(2, 60), SamplingParams(max_tokens=16, ignore_eos=True))
    tokens, tiers = [], []
    for _ in range(3):
        tiers.append(load(engine, stored.info, stored.path).tier)
        tokens.append(run(engine, asked).tokens["r"])
        engine.unload(INSTANCE)
        assert engine._sleeping.evict()
    assert tokens == tokens[:1] * 3
    return tiers


@pytest.mark.parametrize("name", ["gemma2", "phi3-longrope", "qwen2-moe"])
def test_models_of_other_families_are_restored_whole(make: Make, tmp_path: Path, name: str) -> None:
    family = families()[name]
    folder = write_family(tmp_path / "made", family["config"], family["shapes"], layers_gain=0.3)
    disk, *others = switched(make(), folder, tmp_path)
    assert (disk, others) == (LoadTier.DISK, [LoadTier.HOST] * 2)


def test_what_a_load_packs_out_of_reach_is_read_from_disk_ever_again(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM does for CPUs with integers of 8 bits. Only once somebody tries."""
    family = families()["mistral"]
    config = family["config"] | {"sliding_window": None}
    folder = write_family(tmp_path / "made", config, family["shapes"], layers_gain=0.3)
    quantise(folder)
    tiers = switched(make(dtype="float16"), folder, tmp_path)
    assert tiers == [LoadTier.DISK] * 3
    assert caplog.text.count("is not loaded from the pool") == 1


@pytest.mark.parametrize("what", ["tensors", "beside"])
def test_what_is_not_this_loads_is_read_from_disk(
    make: Make, stored: StoredModel, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    tokens = left_by(engine, stored)
    (entry,) = engine._pool._entries.values()  # type: ignore[union-attr]
    held = getattr(entry.range.layout, what)
    odd = replace(entry.range.layout, **{what: (*held, ("model.scale", "0.5"))})
    entry.range = replace(entry.range, layout=odd)
    with caplog.at_level(logging.WARNING):
        driver = serve(engine, stored, TWO)
    assert "not loaded from the pool: the pool's weights are not this load's: (" in caplog.text
    assert (driver.loaded.tier, driver.run("r", PROMPT)) == (LoadTier.DISK, tokens)
    engine.unload(TWO)
    assert len(engine.asleep()) == 1, "it has filled a range of its own"


def test_a_process_killed_before_all_of_it_is_there_leaves_nothing(
    make: Make, stored: StoredModel
) -> None:
    """Half of the pool is too little for it ahead of its sleep."""
    engine = make(asleep_bytes_max=CHUNK_BYTES + CHUNK_BYTES // 2)
    pid = started(engine, stored, ONE)
    os.kill(pid, signal.SIGSTOP)
    thread, outcomes = outcome_of(lambda: engine.unload(ONE))
    until(lambda: engine._pool.used_bytes > 0)  # type: ignore[union-attr]
    assert engine.in_host_memory() == ()
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S_MAX)
    assert outcomes == [None]
    assert engine._pool.used_bytes == 0  # type: ignore[union-attr]
    assert serve(engine, stored).loaded.tier is LoadTier.DISK


def test_a_load_killed_amid_the_pool_goes_on_from_disk(make: Make, stored: StoredModel) -> None:
    engine = make()
    tokens, before = left_by(engine, stored), engine_processes()
    thread, outcomes = outcome_of(lambda: serve(engine, stored, TWO))
    until(lambda: bool(engine_processes() - before))
    (pid,) = engine_processes() - before
    os.kill(pid, signal.SIGKILL)
    thread.join(WAIT_S_MAX)
    (driver,) = outcomes
    assert isinstance(driver, Driver), driver
    assert (driver.loaded.tier, driver.run("r", PROMPT)) == (LoadTier.DISK, tokens)


def test_a_full_pool_has_unloads_and_loads_as_if_there_were_none(
    make: Make, stored: StoredModel
) -> None:
    engine = make(asleep_bytes_max=CHUNK_BYTES // 2)
    for _ in range(2):
        assert serve(engine, stored).loaded.tier is LoadTier.DISK
        engine.unload(ONE)
        assert engine.in_host_memory() == ()


def test_two_instances_at_once_take_one_place(make: Make, stored: StoredModel) -> None:
    engine = make(asleep_max=2)
    one = serve(engine, stored, ONE)
    until(lambda: bool(engine.in_host_memory()))
    two = serve(engine, stored, TWO)
    assert (one.loaded.tier, two.loaded.tier) == (LoadTier.DISK, LoadTier.HOST)
    assert one.run("r", PROMPT) == two.run("r", PROMPT)
    for name in (ONE, TWO):
        engine.unload(name)
    assert len(engine.asleep()) == 2
    assert engine._pool.used_bytes < CHUNK_BYTES + 2**20  # type: ignore[union-attr]
