"""Both ways of resizing keep every token, and memory follows what the books say."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mesh.domain.errors import OutOfMemory
from mesh.domain.model import ComputePrecision, KvPrecision, WeightPrecision
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kv_blocks import KvBlocks
from mesh_nodes.engines.openvino import kv_cache
from mesh_nodes.engines.openvino.blocks import BlockPlaces
from mesh_nodes.engines.openvino.compilation import CompiledGraph, Compiler
from mesh_nodes.engines.openvino.kv_cache import (
    FIRST_BLOCK,
    CopyingKvCache,
    ElasticKvCache,
    KvResize,
    bind_kv_cache,
)
from mesh_nodes.engines.openvino.precisions import Precisions
from tests.nodes.engines.openvino.residency import resident_bytes
from tests.nodes.engines.openvino.tiny import CONTEXT_TOKENS_MAX, TinyModel
from tests.support.waiting import until

RANGE_BLOCKS = 4096
NONE = np.zeros(0, np.int64)
NAMES = ("key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1")


class Bound:
    """A cache, its pool, and the infer request that sees it."""

    def __init__(self, graph: CompiledGraph, how: KvResize, blocks: int) -> None:
        self.request = graph.model.create_infer_request()
        self.cache = bind_kv_cache(
            how, graph.model, self.request, blocks=blocks, range_blocks=RANGE_BLOCKS
        )
        self.places = BlockPlaces(self.cache, blocks=blocks, total=RANGE_BLOCKS)
        self.pool = KvBlocks(blocks, self.places, CacheBudget())

    def resize(self, blocks: int) -> dict[int, int]:
        """As an instance does it; returns where the blocks in use have gone."""
        self.pool.resize(blocks)
        in_use = self.places.taken()
        places = self.places.places_below(blocks) if self.cache.dense else in_use
        self.cache.resize(blocks, in_use, places)
        self.places.resize(blocks, places)
        return dict(zip(in_use.tolist(), places.tolist(), strict=True))

    def blocks(self, name: str) -> np.ndarray:
        """One layer's cache as the model sees it, without the scratch block."""
        return np.asarray(self.request.get_tensor(name).data)[FIRST_BLOCK:]

    def write(self, blocks: list[int], number: int) -> None:
        for layer, name in enumerate(NAMES):
            self.blocks(name)[blocks] = 100 * layer + number

    def numbers(self, block: int) -> set[float]:
        """What was written there; one number unless the layers disagree."""
        layers = enumerate(NAMES)
        return {
            float(value) - 100 * n for n, name in layers for value in self.blocks(name)[block].flat
        }


@pytest.fixture(scope="module")
def graphs(tiny: TinyModel) -> dict[KvPrecision, CompiledGraph]:
    """Blocks of f32 cover whole pages, those of f16 do not. The plugin asks for bf16 where it
    computes in that, and where the CPU cannot, for f16.
    """
    made = {}
    for kv in (KvPrecision.F32, KvPrecision.F16, KvPrecision.BF16):
        compute = ComputePrecision.BF16 if kv is KvPrecision.BF16 else ComputePrecision.F32
        precisions = Precisions(compute=compute, kv=kv)
        compiler = Compiler(threads=1, weights=WeightPrecision.F16, precisions=precisions)
        made[kv] = compiler.compile(tiny.info, tiny.path, CONTEXT_TOKENS_MAX, lambda *_: None)
    return made


Bind = Callable[..., Bound]


@pytest.fixture
def bind(graphs: dict[KvPrecision, CompiledGraph]) -> Iterator[Bind]:
    made = []

    def bind(
        how: KvResize = KvResize.ELASTIC, kv: KvPrecision = KvPrecision.F32, blocks: int = 8
    ) -> Bound:
        made.append(Bound(graphs[kv], how, blocks))
        return made[-1]

    yield bind
    for bound in made:
        bound.cache.close()


every_way = pytest.mark.parametrize("how", list(KvResize))
every_precision = pytest.mark.parametrize(
    "kv", [KvPrecision.F32, KvPrecision.F16, KvPrecision.BF16]
)


@every_way
@every_precision
def test_blocks_in_use_outlive_any_resize(bind: Bind, how: KvResize, kv: KvPrecision) -> None:
    """Requests come and go between them, and none sees another's tokens."""
    bound = bind(how, kv, blocks=8)
    rng = np.random.default_rng(5)
    contents: dict[int, int] = {}
    for serial in range(40):
        taken = bound.pool.take(int(rng.integers(0, bound.pool.free + 1)))
        bound.write(taken, serial)
        contents |= dict.fromkeys(taken, serial)
        gone = [block for block in contents if rng.random() < 0.4]
        bound.pool.release(gone)
        contents = {block: n for block, n in contents.items() if block not in gone}
        if not contents:
            bound.cache.rest(NONE)
        places = bound.resize(max(int(rng.integers(1, 60)), bound.pool.used))
        contents = {places[block]: n for block, n in contents.items()}
        assert [bound.numbers(block) for block in contents] == [{n} for n in contents.values()]
        assert bound.cache.held_bytes >= bound.pool.used * bound.cache.block_bytes


@every_way
@every_precision
def test_memory_is_what_the_books_say(bind: Bind, how: KvResize, kv: KvPrecision) -> None:
    bound = bind(how, kv)
    whole_bytes = RANGE_BLOCKS * bound.cache.block_bytes
    assert whole_bytes > 30 * 2**20
    empty = resident_bytes()

    def taken_bytes() -> int:
        return resident_bytes() - empty

    bound.resize(RANGE_BLOCKS)
    assert taken_bytes() < 0.05 * whole_bytes, "growing touches nothing"
    taken = bound.pool.take(RANGE_BLOCKS)
    bound.write(taken, 1)
    assert bound.cache.held_bytes == whole_bytes
    assert 0.95 * whole_bytes < taken_bytes() < 1.05 * whole_bytes
    bound.pool.release(taken[::2])
    bound.resize(RANGE_BLOCKS // 2)
    until(lambda: bound.cache.held_bytes == whole_bytes // 2)
    assert 0.45 * whole_bytes < taken_bytes() < 0.55 * whole_bytes
    bound.cache.close()
    assert bound.cache.held_bytes == 0
    assert taken_bytes() < 0.05 * whole_bytes


def test_memory_of_a_cache_at_rest_goes_and_what_comes_anew_is_zeros(bind: Bind) -> None:
    bound = bind(blocks=64)
    taken = bound.pool.take(64)
    bound.write(taken, 1)
    bound.pool.release(taken)
    bound.cache.rest(NONE)
    assert bound.cache.held_bytes == 64 * bound.cache.block_bytes, "a request may come yet"
    until(lambda: bound.cache.held_bytes == 0)
    assert not any(bound.blocks(name).any() for name in NAMES)


def test_no_token_moves_where_blocks_cover_whole_pages(bind: Bind) -> None:
    bound = bind(blocks=100)
    bound.pool.release(bound.pool.take(100)[:99])
    assert bound.resize(1) == {99: 99}
    until(lambda: bound.cache.held_bytes == bound.cache.block_bytes)
    assert bound.pool.free == 0


def test_where_they_do_not_the_tail_moves_and_all_its_pages_go(bind: Bind) -> None:
    bound = bind(kv=KvPrecision.F16, blocks=100)
    taken = bound.pool.take(100)
    bound.write(taken, 3)
    bound.pool.release(taken[:99])
    assert bound.resize(1) == {99: 0}
    assert bound.numbers(0) == {3.0}


@every_way
def test_backed_blocks_have_memory_and_others_are_left_alone(bind: Bind, how: KvResize) -> None:
    bound = bind(how, blocks=RANGE_BLOCKS)
    bound.write([0], 7)
    empty = resident_bytes()
    bound.cache.back(np.arange(1, RANGE_BLOCKS // 2 + 1))
    backed_bytes = RANGE_BLOCKS // 2 * bound.cache.block_bytes
    assert 0.9 * backed_bytes < resident_bytes() - empty < 1.1 * backed_bytes
    assert bound.numbers(0) == {7.0}
    for name in NAMES:
        array = bound.blocks(name)
        assert array[1 : RANGE_BLOCKS // 2 + 1].min() > np.finfo(np.float32).tiny
        assert not array[RANGE_BLOCKS // 2 + 1 :].any()


@every_way
def test_a_block_is_backed_once_and_again_after_its_memory_went(bind: Bind, how: KvResize) -> None:
    bound = bind(how)
    taken = bound.pool.take(6)
    bound.cache.back(np.array(taken))
    bound.write(taken, 3)
    bound.cache.back(np.array(taken))
    assert bound.numbers(5) == {3.0}, "there is memory under it already"
    bound.pool.release(taken[2:])
    bound.resize(2)
    until(lambda: bound.cache.held_bytes == 2 * bound.cache.block_bytes)
    bound.resize(8)
    bound.cache.back(np.array(bound.pool.take(6)))
    assert bound.numbers(1) == {3.0}
    assert all(0 < bound.blocks(name)[5].min() < 1 for name in NAMES)


def test_without_addresses_for_a_range_a_cache_copies(
    bind: Bind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OutOfMemory("no addresses")

    assert isinstance(bind().cache, ElasticKvCache)
    monkeypatch.setattr(kv_cache, "ElasticKvCache", refuse)
    bound = bind()
    assert isinstance(bound.cache, CopyingKvCache)
    assert "will copy it: no addresses" in caplog.text
    taken = bound.pool.take(8)
    bound.write(taken, 2)
    bound.resize(1000)
    assert bound.numbers(7) == {2.0}


def test_a_copy_that_finds_no_memory_changes_nothing(bind: Bind) -> None:
    bound = bind(KvResize.COPYING)
    taken = bound.pool.take(8)
    bound.write(taken, 2)
    with pytest.raises(OutOfMemory):
        bound.cache.resize(2**50, bound.places.taken(), bound.places.taken())
    assert bound.numbers(7) == {2.0}
    assert bound.cache.held_bytes == 8 * bound.cache.block_bytes
