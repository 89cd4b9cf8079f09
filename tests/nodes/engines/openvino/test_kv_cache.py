"""Resizing maps and unmaps memory, and neither costs nor loses a token that stays."""

from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from mesh_nodes.engines.openvino.compilation import Compiler, KvPrecision
from mesh_nodes.engines.openvino.kv_cache import FIRST_BLOCK, KvCache
from mesh_nodes.engines.openvino.weights import WeightPrecision
from tests.nodes.engines.openvino.tiny import CONTEXT_TOKENS_MAX, TinyModel

RANGE_BLOCKS = 4096
NAMES = ("key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1")


class Bound:
    """A cache and the infer request that sees it."""

    def __init__(self, tiny: TinyModel) -> None:
        compiler = Compiler(threads=1, weights=WeightPrecision.F16, kv=KvPrecision.F32)
        self.graph = compiler.compile(tiny.info, tiny.path, CONTEXT_TOKENS_MAX, lambda *_: None)
        self.request = self.graph.model.create_infer_request()
        self.cache = KvCache(self.graph.model, self.request, blocks=8, range_blocks=RANGE_BLOCKS)

    def blocks(self, name: str) -> np.ndarray:
        """One layer's cache as the model sees it, without the scratch block."""
        return np.asarray(self.request.get_tensor(name).data)[FIRST_BLOCK:]


@pytest.fixture
def bound(tiny: TinyModel) -> Iterator[Bound]:
    bound = Bound(tiny)
    yield bound
    bound.cache.close()


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_shrink_gives_pages_back_and_a_close_all_of_them(bound: Bound) -> None:
    whole_bytes = RANGE_BLOCKS * bound.cache.block_bytes
    assert whole_bytes > 60 * 2**20
    empty = resident_bytes()
    bound.cache.resize(RANGE_BLOCKS, {})
    assert resident_bytes() - empty < 0.1 * whole_bytes, "growing touches nothing"
    for name in NAMES:
        bound.blocks(name).fill(1)
    assert resident_bytes() - empty > 0.9 * whole_bytes
    bound.cache.resize(RANGE_BLOCKS // 2, {})
    assert resident_bytes() - empty < 0.6 * whole_bytes
    bound.cache.close()
    assert resident_bytes() - empty < 0.1 * whole_bytes


def test_blocks_keep_their_contents_where_they_stay_and_where_they_move(bound: Bound) -> None:
    for number, name in enumerate(NAMES):
        bound.blocks(name)[:] = 100 * number + np.arange(8).reshape(8, 1, 1, 1)
    bound.cache.resize(3, {7: 1, 4: 2})
    bound.cache.resize(4000, {})
    bound.cache.resize(5, {})
    for number, name in enumerate(NAMES):
        array = bound.blocks(name)
        assert array.shape[0] == 5
        assert [set(block.ravel()) for block in array[:3]] == [
            {100.0 * number},
            {100.0 * number + 7},
            {100.0 * number + 4},
        ]
        assert not array[3:].any(), "fresh blocks are zeros"


def test_backed_blocks_have_memory_of_their_own_and_the_others_are_left_alone(bound: Bound) -> None:
    bound.cache.resize(RANGE_BLOCKS, {})
    for name in NAMES:
        bound.blocks(name)[0] = 7
    empty = resident_bytes()
    bound.cache.back(range(1, RANGE_BLOCKS // 2 + 1))
    backed_bytes = RANGE_BLOCKS // 2 * bound.cache.block_bytes
    assert 0.9 * backed_bytes < resident_bytes() - empty < 1.1 * backed_bytes
    for name in NAMES:
        array = bound.blocks(name)
        assert set(array[0].ravel()) == {7.0}
        assert array[1 : RANGE_BLOCKS // 2 + 1].min() > np.finfo(np.float32).tiny
        assert not array[RANGE_BLOCKS // 2 + 1 :].any()


def test_a_block_is_backed_once_and_again_after_a_shrink_took_it(bound: Bound) -> None:
    bound.cache.back([1, 5])
    for name in NAMES:
        bound.blocks(name)[:] = 3
    bound.cache.back([1, 5])
    assert {bound.blocks(name).min() for name in NAMES} == {3.0}, "there is memory under it already"
    bound.cache.resize(2, {})
    bound.cache.resize(8, {})
    bound.cache.back([1, 5])
    for name in NAMES:
        array = bound.blocks(name)
        assert set(array[1].ravel()) == {3.0}
        assert 0 < array[5].min() == array[5].max() < 1


def test_every_layer_sees_every_size(bound: Bound) -> None:
    for blocks in (1, 4096, 2, 7, 1000, 1):
        bound.cache.resize(blocks, {})
        assert {bound.blocks(name).shape[0] for name in NAMES} == {blocks}
