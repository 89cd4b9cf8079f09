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


def test_every_layer_sees_every_size(bound: Bound) -> None:
    for blocks in (1, 4096, 2, 7, 1000, 1):
        bound.cache.resize(blocks, {})
        assert {bound.blocks(name).shape[0] for name in NAMES} == {blocks}
