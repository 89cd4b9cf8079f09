"""Pages come under blocks that are written and go with a shrink; what is kept keeps its data."""

import pytest
import torch

from mesh.domain.errors import OutOfMemory, UnsupportedModel
from mesh_nodes.engines.page_range import PAGE_BYTES
from mesh_nodes.engines.vllm.kv_memory import CopyingKv, ElasticKv
from tests.nodes.engines.openvino.residency import resident_bytes

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 2, 2048, 2, 32, 64
LAYER_BLOCK_BYTES = HEADS * TOKENS * WIDTH * 4
BLOCK_BYTES = LAYERS * LAYER_BLOCK_BYTES


def elastic() -> tuple[ElasticKv, list[torch.Tensor]]:
    kv = ElasticKv(BLOCK_BYTES)
    buffer = kv.allocate(LAYERS * BLOCKS * LAYER_BLOCK_BYTES)
    tensors = list(buffer.view(torch.float32).view(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH))
    assert kv.bind(tensors) == tensors
    return kv, tensors


def test_the_buffer_takes_no_memory_until_it_is_written() -> None:
    before = resident_bytes()
    kv, tensors = elastic()
    assert resident_bytes() - before < 2**23 < LAYERS * BLOCKS * LAYER_BLOCK_BYTES
    assert not tensors[1][5].any()
    assert kv.held_bytes == 0


def test_a_layout_whose_blocks_lie_apart_is_refused() -> None:
    kv = ElasticKv(BLOCK_BYTES)
    buffer = kv.allocate(LAYERS * BLOCKS * LAYER_BLOCK_BYTES).view(torch.float32)
    mixed = buffer.view(BLOCKS, LAYERS, HEADS, TOKENS, WIDTH)
    with pytest.raises(RuntimeError, match="KV blocks lie apart"):
        kv.bind([mixed[:, layer] for layer in range(LAYERS)])


def test_a_model_that_keeps_other_bytes_than_were_booked_is_refused() -> None:
    """One layer shares another's cache, for one."""
    kv = ElasticKv(BLOCK_BYTES)
    buffer = kv.allocate(BLOCKS * LAYER_BLOCK_BYTES).view(torch.float32)
    wanted = f"takes {LAYER_BLOCK_BYTES} bytes in vLLM and {BLOCK_BYTES} by its config.json"
    with pytest.raises(UnsupportedModel, match=wanted):
        kv.bind([buffer.view(BLOCKS, HEADS, TOKENS, WIDTH)])


def nothing_else(old: torch.Tensor, new: torch.Tensor) -> None:
    raise AssertionError("an elastic cache keeps its tensors")


def test_a_shrink_gives_back_the_pages_of_free_blocks_and_of_no_other() -> None:
    kv, tensors = elastic()
    before = resident_bytes()
    kv.taken(range(1000))
    for tensor in tensors:
        tensor[:1000] = 1.5
    assert kv.held_bytes == 1000 * BLOCK_BYTES
    assert resident_bytes() - before >= 1000 * BLOCK_BYTES
    in_use = [3, 4, 999]
    kv.resize(10, in_use, [], nothing_else)
    assert kv.held_bytes == 10 * BLOCK_BYTES
    assert resident_bytes() - before < 10 * BLOCK_BYTES + 400 * PAGE_BYTES
    for tensor in tensors:
        assert all(bool((tensor[block] == 1.5).all()) for block in in_use)
        assert not tensor[998].any()


def test_a_resize_to_more_than_is_held_gives_nothing_back() -> None:
    kv, _ = elastic()
    kv.taken([1, 2, 3])
    kv.resize(3, [], [], nothing_else)
    assert kv.held_bytes == 3 * BLOCK_BYTES


def test_backing_puts_memory_under_fresh_blocks_and_leaves_written_ones() -> None:
    kv, tensors = elastic()
    kv.taken([7])
    tensors[0][7] = 2.0
    before = resident_bytes()
    kv.back(range(7, 207))
    assert resident_bytes() - before >= 190 * BLOCK_BYTES
    assert kv.held_bytes == 200 * BLOCK_BYTES
    assert bool((tensors[0][7] == 2.0).all())


def copying(blocks: int, free_bytes: int = 1 << 40) -> tuple[CopyingKv, list[torch.Tensor]]:
    kv = CopyingKv(BLOCK_BYTES, blocks, torch.device("cpu"), lambda: free_bytes)
    buffer = kv.allocate(LAYERS * BLOCKS * LAYER_BLOCK_BYTES)
    views = list(buffer.view(torch.float32).view(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH))
    return kv, kv.bind(views)


def test_copying_makes_tensors_of_the_size_in_force_and_keeps_what_is_in_use() -> None:
    """Wherever it goes: block 5 to 2, and block 1 stays. One layer at a time is there twice."""
    kv, tensors = copying(8)
    assert [t.shape[0] for t in tensors] == [9] * LAYERS, "with the block that is vLLM's own"
    for layer, tensor in enumerate(tensors):
        tensor[1], tensor[5] = 1.0 + layer, 5.0 + layer
    now = list(tensors)

    def replace(old: torch.Tensor, new: torch.Tensor) -> None:
        (layer,) = (number for number, tensor in enumerate(now) if tensor is old)
        assert all(not t.untyped_storage().nbytes() for t in tensors[:layer])
        now[layer] = new

    kv.resize(2, [1, 2], [(5, 2)], replace)
    for layer, tensor in enumerate(now):
        assert tensor.shape[0] == 3
        assert bool((tensor[1] == 1.0 + layer).all())
        assert bool((tensor[2] == 5.0 + layer).all())
    assert kv.held_bytes == 2 * BLOCK_BYTES
    tensors = list(now)
    kv.resize(4, [2], [], replace)
    assert now[0].shape[0] == 5
    assert bool((now[0][2] == 5.0).all())
    assert not now[0][4].any()


@pytest.mark.parametrize(("before", "after"), [(300, 200), (300, 20), (300, 299), (20, 300)])
def test_copying_counts_what_it_takes_at_the_most(before: int, after: int) -> None:
    """The tensors that live at once, as torch has them, and not a byte more is asked for."""
    kept = list(range(1, min(before, after) + 1))
    most, layer_block = 0, LAYER_BLOCK_BYTES
    now = [before + 1] * LAYERS

    def replace(old: torch.Tensor, new: torch.Tensor) -> None:
        nonlocal most
        copied = min(len(kept), 64)
        most = max(most, sum(now) + new.shape[0] + copied)
        now[now.index(old.shape[0])] = new.shape[0]

    kv, _ = copying(before)
    kv.resize(after, kept, [], replace)
    extra_bytes = (most - LAYERS * (before + 1)) * layer_block
    copying(before, free_bytes=extra_bytes)[0].check_room(after)
    with pytest.raises(OutOfMemory, match=f"a KV cache of {after} blocks"):
        copying(before, free_bytes=extra_bytes - 1)[0].check_room(after)


def test_copying_refuses_what_the_device_has_no_room_for() -> None:
    kv, _ = copying(8, free_bytes=4 * BLOCK_BYTES)
    kv.check_room(8)
    kv.check_room(2)
    with pytest.raises(OutOfMemory, match="a KV cache of 10 blocks"):
        kv.check_room(10)
    assert kv.held_bytes == 8 * BLOCK_BYTES
