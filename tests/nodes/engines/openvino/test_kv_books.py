"""The engine's books of its KV caches agree with what the process holds, and nothing leaks."""

import random
import time

import pytest

from mesh.domain.model import KvPrecision, WeightPrecision
from mesh.domain.request import SamplingParams
from mesh.runtime.engine import InstanceMemory
from mesh_nodes.engines import host_memory
from mesh_nodes.engines.openvino import instance
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.kv_cache import KvResize
from tests.nodes.engines.openvino.residency import mapped_bytes, mappings, resident_bytes
from tests.nodes.engines.openvino.tiny import TinyModel
from tests.nodes.engines.serving import INSTANCE, load, request, run
from tests.support.waiting import until

LOADS = 10
RESIZES = 20
MIB = 2**20
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def books(engine: OpenVinoEngine) -> InstanceMemory:
    return engine.memory()[0]


def test_what_is_held_follows_use_and_not_the_size_in_force(loaded: OpenVinoEngine) -> None:
    until(lambda: books(loaded).kv_held_bytes == 0)
    block_bytes = books(loaded).kv_block_bytes
    loaded.submit(INSTANCE, request("r", range(40), LONG))
    loaded.step(INSTANCE, 64)
    assert books(loaded).kv_used_bytes == books(loaded).kv_held_bytes == 2 * block_bytes
    loaded.resize_kv(INSTANCE, 4000)
    assert books(loaded).kv_held_bytes == 2 * block_bytes
    loaded.submit(INSTANCE, request("s", range(90), SHORT))
    loaded.step(INSTANCE, 128)
    while books(loaded).kv_blocks_used > 3:
        loaded.step(INSTANCE, 128)
    assert books(loaded).kv_held_bytes == 5 * block_bytes, "kept for the next request"
    loaded.resize_kv(INSTANCE, 3)
    until(lambda: books(loaded).kv_held_bytes == 3 * block_bytes)


def test_an_idle_instance_holds_no_kv_but_for_who_comes_soon(loaded: OpenVinoEngine) -> None:
    run(loaded, request("r", range(90), SHORT))
    assert books(loaded).kv_used_bytes == 0
    assert books(loaded).kv_held_bytes == 3 * books(loaded).kv_block_bytes
    loaded.submit(INSTANCE, request("s", range(30), LONG))
    loaded.step(INSTANCE, 64)
    time.sleep(0.4)
    assert books(loaded).kv_used_bytes == books(loaded).kv_block_bytes
    assert books(loaded).kv_held_bytes == 3 * books(loaded).kv_block_bytes, "for those that follow"
    loaded.abort(INSTANCE, request("s", range(30)).request_id)
    until(lambda: books(loaded).kv_held_bytes == 0)


@pytest.mark.parametrize("how", list(KvResize))
def test_loads_and_unloads_leave_no_mapping_and_no_memory(tiny: TinyModel, how: KvResize) -> None:
    engine = OpenVinoEngine(
        threads=1, weights=WeightPrecision.F16, kv=KvPrecision.F32, kv_resize=how
    )

    def cycle() -> None:
        load(engine, tiny.info, tiny.path, kv_blocks=8192)
        run(engine, request("r", range(60), SHORT))
        engine.unload(INSTANCE)

    for _ in range(5):
        cycle()
    before = (mappings(), mapped_bytes(), resident_bytes())
    range_bytes = 8192 * engine.footprint(tiny.info).kv_block_bytes
    assert range_bytes > 100 * MIB
    for _ in range(LOADS):
        cycle()
    assert mappings() - before[0] < LOADS / 2
    assert mapped_bytes() - before[1] < range_bytes
    assert resident_bytes() - before[2] < 8 * MIB + LOADS / 4 * MIB
    engine.close()


def test_an_unload_returns_the_range(engine: OpenVinoEngine, tiny: TinyModel) -> None:
    mapped = mapped_bytes()
    load(engine, tiny.info, tiny.path, batch_max=65536)
    assert mapped_bytes() - mapped > 8000 * MIB
    run(engine, request("r", range(60), SHORT))
    engine.unload(INSTANCE)
    assert mapped_bytes() - mapped < 1000 * MIB


@pytest.mark.parametrize("how", list(KvResize))
def test_resizes_leave_no_mapping_and_no_memory(tiny: TinyModel, how: KvResize) -> None:
    engine = OpenVinoEngine(
        threads=1, weights=WeightPrecision.F16, kv=KvPrecision.F32, kv_resize=how
    )
    load(engine, tiny.info, tiny.path)
    rng = random.Random(2)

    def cycle() -> None:
        engine.resize_kv(INSTANCE, rng.randrange(1000, 4000))
        engine.step(INSTANCE, 64)
        engine.resize_kv(INSTANCE, rng.randrange(1, 100))

    engine.submit(INSTANCE, request("r", range(40), LONG))
    for _ in range(5):
        cycle()
    before = (mappings(), mapped_bytes(), resident_bytes())
    for _ in range(RESIZES):
        cycle()
    assert mappings() - before[0] < RESIZES / 2
    assert mapped_bytes() - before[1] < 200 * MIB
    assert resident_bytes() - before[2] < 20 * MIB
    engine.close()


def test_a_cache_has_numbers_for_no_more_blocks_than_the_machine_could_hold(
    engine: OpenVinoEngine, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the context: each claim looks through all of them."""
    monkeypatch.setattr(instance, "_RANGE_BLOCKS_MIN", 1)
    block_bytes = engine.footprint(tiny.info).kv_block_bytes
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 100 * block_bytes)
    load(engine, tiny.info, tiny.path, context_tokens_max=1 << 16, batch_max=256)
    assert engine.resize_kv(INSTANCE, 1 << 20).kv_blocks == 100
