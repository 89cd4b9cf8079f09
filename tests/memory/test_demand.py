"""The size of a new instance's KV cache."""

from mesh.memory.demand import estimate_footprint, kv_blocks_within
from tests.core.cells import FOOTPRINT, MIB, MODEL


def blocks(free_bytes: int) -> int | None:
    return kv_blocks_within(FOOTPRINT, least=16, wanted=64, free_bytes=free_bytes)


def test_the_wanted_blocks_where_memory_allows_else_what_fits_else_nothing() -> None:
    assert blocks(1000 * MIB) == 64
    assert blocks(150 * MIB) == 50
    assert blocks(116 * MIB) == 16
    assert blocks(116 * MIB - 1) is None


def test_an_unmeasured_model_is_estimated_from_its_shape() -> None:
    footprint = estimate_footprint(MODEL)
    assert footprint.weights_bytes >= MODEL.disk_bytes
    assert footprint.kv_block_bytes == 32 * 2 * 2 * 2 * 16 * 2, "tokens, k+v, layers, heads, f16"
