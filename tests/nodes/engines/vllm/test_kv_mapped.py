"""A cache in virtual memory grows and shrinks where it is; what is in use keeps its tokens."""

import random
from contextlib import closing
from functools import partial
from operator import eq

import pytest
import torch

from mesh.domain.errors import EngineError, OutOfMemory
from mesh_nodes.engines.cuda_driver import CudaDriver
from mesh_nodes.engines.vllm import VllmEngine
from mesh_nodes.engines.vllm.environment import ENVIRONMENT
from mesh_nodes.engines.vllm.kv_mapped import MappedKv, _Memory, kv_memory
from mesh_nodes.engines.vllm.kv_memory import CopyingKv, ElasticKv
from mesh_nodes.engines.vllm.spawner import Spawner
from tests.contract.engine_contract import StoredModel
from tests.nodes.engines.serving import INSTANCE, load, request, run
from tests.support.cuda_driver import StandInDriver

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 200, 2, 16, 24
"""A block of a layer takes 1.5 KiB: it and a chunk of 16 KiB have no boundary in common but each
third, and layers meet amid a chunk.
"""
LAYER_BLOCK_BYTES = HEADS * TOKENS * WIDTH * 2


def made(
    blocks: int, device: StandInDriver | None = None
) -> tuple[MappedKv, StandInDriver, torch.Tensor]:
    """The cache, its device and all layers as one tensor."""
    device = device or StandInDriver(100)
    kv = MappedKv(
        CudaDriver(device, 0),
        LAYERS * LAYER_BLOCK_BYTES,
        blocks,
        torch.device("cpu"),
        lambda: device.free_bytes,
    )
    buffer = kv.allocate(LAYERS * BLOCKS * LAYER_BLOCK_BYTES)
    whole = buffer.view(torch.float16).view(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
    layers = list(whole)
    assert kv.bind(layers) == layers
    return kv, device, whole


def nothing_else(old: torch.Tensor, new: torch.Tensor) -> None:
    raise AssertionError("a cache in virtual memory keeps its tensors")


def holds(kv: MappedKv, device: StandInDriver, blocks: int) -> None:
    """No more chunks than each layer's blocks touch, and one for each spare."""
    per_layer = -(-(blocks + 1) * LAYER_BLOCK_BYTES // device.chunk_bytes) + 1
    assert kv.device_bytes == len(device.handles) * device.chunk_bytes
    assert len(device.mapped) <= LAYERS * per_layer
    assert kv.held_bytes == blocks * LAYERS * LAYER_BLOCK_BYTES
    assert kv.device_bytes <= LAYERS * (per_layer + 1) * device.chunk_bytes


def test_memory_follows_the_size_and_tensors_stay() -> None:
    kv, device, whole = made(20)
    holds(kv, device, 20)
    assert not whole[:, :21].any()
    whole[:, 1:21] = 1.5
    kv.resize(150, range(1, 21), [], nothing_else)
    holds(kv, device, 150)
    assert bool((whole[:, 1:21] == 1.5).all())
    assert not whole[:, 21:151].any()
    whole[:, 21:151] = float("nan")
    kv.resize(20, range(1, 21), [], nothing_else)
    holds(kv, device, 20)
    kv.resize(150, range(1, 21), [], nothing_else)
    assert bool((whole[:, 1:21] == 1.5).all())
    assert not whole[:, 60:151].any(), "nobody reads what another has left there"


def test_a_shrink_moves_blocks_with_high_numbers_and_no_other() -> None:
    kv, _, whole = made(150)
    numbers = torch.arange(BLOCKS, dtype=torch.float16)[:151]
    whole[:, :151] = numbers[None, :, None, None, None]
    moves = [(150 - n, 1 + n) for n in range(70)]
    kv.resize(75, range(1, 71), moves, nothing_else)
    for old, new in moves:
        assert bool((whole[:, new] == old).all())
    assert bool((whole[:, 71:76] == numbers[71:76, None, None, None]).all())


def test_one_that_sleeps_holds_nothing_and_comes_back_empty() -> None:
    kv, device, whole = made(150)
    whole[:, :151] = 7.0
    kv.resize(0, [], [], nothing_else)
    assert kv.device_bytes == 0
    assert not device.handles
    kv.resize(30, [], [], nothing_else)
    assert not whole[:, :31].any()


def test_a_grow_that_the_driver_refuses_changes_nothing() -> None:
    kv, device, whole = made(20)
    whole[:, :21] = 3.0
    held_bytes = kv.device_bytes
    for function in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        device.fails = partial(eq, function)
        with pytest.raises(EngineError, match=function):
            kv.resize(150, range(1, 21), [], nothing_else)
        device.fails = lambda asked: False
        kv.resize(20, range(1, 21), [], nothing_else)
        assert kv.device_bytes <= held_bytes + LAYERS * device.chunk_bytes
        assert bool((whole[:, :21] == 3.0).all())


def test_room_is_checked_before_anything_is_done() -> None:
    kv, _, _ = made(20, StandInDriver(20))
    kv.check_room(20)
    kv.check_room(5)
    kv.check_room(50)
    with pytest.raises(OutOfMemory, match="a KV cache of 190 blocks wants"):
        kv.check_room(190)


def test_a_layout_whose_blocks_lie_apart_is_refused() -> None:
    kv = MappedKv(
        CudaDriver(StandInDriver(100), 0),
        LAYERS * LAYER_BLOCK_BYTES,
        4,
        torch.device("cpu"),
        lambda: 0,
    )
    buffer = kv.allocate(LAYERS * BLOCKS * LAYER_BLOCK_BYTES).view(torch.float16)
    mixed = buffer.view(BLOCKS, LAYERS, HEADS, TOKENS, WIDTH)
    with pytest.raises(RuntimeError, match="KV blocks lie apart"):
        kv.bind([mixed[:, layer] for layer in range(LAYERS)])


@pytest.mark.parametrize("seed", range(5))
def test_tokens_survive_any_resizes_on_a_driver_that_fails_now_and_then(seed: int) -> None:
    """As `instance` does it: what is in use above the new size moves down, grows may be refused."""
    draw = random.Random(seed)
    failing = 0.0
    device = StandInDriver(60)
    kv, _, whole = made(30, device)
    device.fails = lambda function: draw.random() < failing
    size, content = 30, dict[int, float]()
    for step in range(400):
        failing = draw.choice((0.0, 0.05, 0.5))
        for block in draw.sample(range(1, size + 1), draw.randint(0, min(size, 8))):
            if block in content:
                del content[block]
            else:
                content[block] = float(step)
                whole[:, block] = float(step)
        asked = draw.randint(max(len(content), 1), BLOCKS - 1)
        low = [block for block in range(1, asked + 1) if block not in content]
        moves = [(block, low.pop()) for block in sorted(content) if block > asked]
        try:
            kv.check_room(asked)
            kv.resize(asked, content, moves, nothing_else)
        except EngineError:
            assert not moves
        else:
            for old, new in moves:
                content[new] = content.pop(old)
            size = asked
        for block, value in content.items():
            assert bool((whole[:, block] == value).all())
        assert kv.device_bytes == len(device.handles) * device.chunk_bytes
    failing = 0.0
    kv.resize(0, [], [], nothing_else)
    assert not device.handles


def test_memory_that_is_not_given_back_is_held() -> None:
    """Beyond what a footprint counts anyway."""
    kv, device, _ = made(150)
    device.fails = partial(eq, "cuMemUnmap")
    kv.resize(10, [], [], nothing_else)
    counted_bytes = 3 * LAYERS * device.chunk_bytes + LAYERS * LAYER_BLOCK_BYTES
    assert kv.held_bytes == kv.device_bytes - counted_bytes
    assert kv.held_bytes > 10 * LAYERS * LAYER_BLOCK_BYTES
    device.fails = lambda function: False
    kv.resize(10, [], [], nothing_else)
    assert kv.held_bytes == 10 * LAYERS * LAYER_BLOCK_BYTES


def test_it_is_taken_where_there_is_a_driver() -> None:
    driver = CudaDriver(StandInDriver(100), 0)

    def kind(elastic: bool, driver: CudaDriver | None, device: str) -> type:
        where = torch.device(device)
        return type(kv_memory(elastic, driver, LAYER_BLOCK_BYTES, 4, where, lambda: 0))

    assert kind(True, driver, "cuda:0") is MappedKv
    assert kind(True, None, "cuda:0") is CopyingKv
    assert kind(False, None, "cuda:0") is CopyingKv
    assert kind(True, None, "cpu") is ElasticKv
    assert kind(False, None, "cpu") is CopyingKv


def test_torch_is_told_of_the_memory_as_of_an_array_on_a_gpu() -> None:
    told = _Memory(1 << 40, 3 << 21).__cuda_array_interface__
    assert told == {"shape": (3 << 21,), "typestr": "|i1", "data": (1 << 40, False), "version": 3}


def test_an_instance_goes_on_after_a_grow_that_the_driver_refused(model: StoredModel) -> None:
    """In the blocks that it had, whatever their number: there is no memory under others."""
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "STAND_IN_CHUNKS_ALLOWED": "100"}
    spawner = Spawner(environment, "tests.support.mapped_forkserver")
    with closing(spawner), closing(VllmEngine(spawner=spawner)) as engine:
        load(engine, model.info, model.path)
        prompts = [[1 + number] * 200 for number in range(8)]
        wanted = run(engine, *(request(f"before {n}", p) for n, p in enumerate(prompts))).tokens
        held_bytes = engine.memory()[0].kv_held_bytes
        with pytest.raises(EngineError, match="cuMemSetAccess: CUDA_ERROR_UNKNOWN"):
            engine.resize_kv(INSTANCE, 2000)
        assert engine.memory()[0].kv_held_bytes == held_bytes
        for turn in range(3):
            got = run(engine, *(request(f"{turn} {n}", p) for n, p in enumerate(prompts))).tokens
            assert list(got.values()) == list(wanted.values())
        assert engine.resize_kv(INSTANCE, 80).kv_blocks == 80
