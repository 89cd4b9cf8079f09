"""Weights in virtual memory keep their addresses, whatever comes and goes under them."""

import ctypes
import logging
import os
from collections.abc import Iterator

import pytest
import torch

from mesh.domain.errors import EngineError, OutOfMemory
from mesh_nodes.engines.cuda_driver import CudaDriver
from mesh_nodes.engines.vllm.footprint import WEIGHTS_PIECE_CHUNKS
from mesh_nodes.engines.vllm.host_pool import CHUNK_BYTES, range_bytes
from mesh_nodes.engines.vllm.messages import Range
from mesh_nodes.engines.vllm.pooled import PooledMemory
from mesh_nodes.engines.vllm.weights import Weights
from mesh_nodes.engines.vllm.weights_memory import FixedMemory
from tests.support.cuda_driver import StandInDriver

CPU = torch.device("cpu")
LAYERS, WIDTH = 6, 200
"""A layer's matrix takes 160,000 bytes, and a piece of memory 65,536."""
ALL_BYTES = LAYERS * (160_256 + 1024) + 1024 + 512
"""Each storage takes whole places of 512 bytes."""


class Layers(torch.nn.Module):  # type: ignore[misc]
    """A head that is the first layer's matrix, and its transpose; a scale; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = torch.nn.Parameter(self.layers[0].weight.data.t(), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.register_buffer("rotation", torch.randn(WIDTH))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given).tanh()
        return (given * self.rotation * self.scale) @ self.head


class Kept:
    """What a CUDA graph keeps of a model: addresses, at which it reads when it is replayed."""

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self._at = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]

    def read(self) -> list[bytes]:
        return [ctypes.string_at(address, size) for address, size in self._at]


class Placed:
    """A model in a device's memory, its weights and what it answered before."""

    def __init__(self, pool: int, chunks: int = 300, device: StandInDriver | None = None) -> None:
        torch.manual_seed(2)
        self.model, self.given = Layers(), torch.randn(3, WIDTH)
        self.expected = self.answer()
        self.device = device or StandInDriver(chunks, chunk_bytes=4096)
        self.memory = FixedMemory(CudaDriver(self.device, 0), self.model, CPU)
        self.weights = Weights(self.model, CPU, PooledMemory(pool), memory=self.memory)
        self.where: Range | None = place(self.weights)
        self.graph = Kept(self.model)
        self.content = self.graph.read()

    def answer(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(self.given)

    def move(self, share: float) -> None:
        self.weights.move(share, self.where)
        self.where = None

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self.device.handles.values())) * self.device.chunk_bytes

    def check(self) -> None:
        """All is there, where it was."""
        assert self.graph.read() == self.content
        assert torch.equal(self.answer(), self.expected)
        assert (self.weights.away_bytes, self.weights.whole) == (0, True)


def place(weights: Weights, *, whole: bool = False) -> Range:
    layout = weights.layout()
    return Range(offset=0, size_bytes=range_bytes(layout), layout=layout, whole=whole)


@pytest.fixture
def pool() -> Iterator[int]:
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, CHUNK_BYTES)
    yield descriptor
    os.close(descriptor)


def test_what_has_kept_an_address_reads_the_same_after_sleeps_and_swaps(pool: int) -> None:
    placed = Placed(pool)
    placed.check()
    placed.weights.to_host(placed.where)
    placed.where = None
    assert (placed.held_bytes, placed.weights.device_bytes) == (0, 0)
    placed.weights.to_device()
    placed.check()
    for share in (0.5, 0.25, 0.75, 0.0, 0.1, 1.0):
        placed.move(share)
    placed.check()
    for parts in (2, 4, 8):
        for part in (*range(parts - 1, -1, -1), *range(1, parts + 1)):
            placed.move(part / parts)
        placed.check()


def test_memory_follows_the_share_in_whole_pieces(pool: int) -> None:
    placed = Placed(pool)
    piece_bytes = WEIGHTS_PIECE_CHUNKS * placed.device.chunk_bytes
    assert placed.held_bytes == -(-ALL_BYTES // piece_bytes) * piece_bytes
    for share in (0.9, 0.5, 0.2, 0.7, 0.0):
        placed.move(share)
        assert placed.held_bytes == placed.weights.device_bytes
        assert placed.held_bytes <= share * ALL_BYTES
        # Books never promise more than has gone.
        assert placed.weights.away_bytes <= ALL_BYTES - placed.held_bytes
    placed.move(1.0)
    placed.check()


def test_it_is_never_there_twice(pool: int) -> None:
    """A device with room for the model, rounded up, and no more will do."""
    Placed(pool, chunks=-(-ALL_BYTES // 65_536) * WEIGHTS_PIECE_CHUNKS).check()
    with pytest.raises(OutOfMemory, match="cuMemCreate"):
        Placed(pool, chunks=-(-ALL_BYTES // 65_536) * WEIGHTS_PIECE_CHUNKS - 1)


def test_what_somebody_else_uses_stays(pool: int, caplog: pytest.LogCaptureFixture) -> None:
    """A view that is no parameter cannot be told of another place, and must not lose its memory."""
    model = Layers()
    view = model.layers[2].weight.data[3:5]
    before, address = view.clone(), view.data_ptr()
    device = StandInDriver(300, chunk_bytes=4096)
    with caplog.at_level(logging.WARNING):
        memory = FixedMemory(CudaDriver(device, 0), model, CPU)
    assert "156 KiB of weights cannot leave the device" in caplog.text
    weights = Weights(model, CPU, PooledMemory(pool), memory=memory)
    weights.to_host(place(weights))
    assert not device.handles
    assert torch.equal(model.layers[2].weight[3:5], before)
    weights.to_device()
    assert view.data_ptr() == address == model.layers[2].weight[3:5].data_ptr()
    assert torch.equal(view, before)


def test_buffers_that_came_later_stay_as_well(pool: int) -> None:
    placed = Placed(pool)
    placed.model.rotation = placed.model.rotation.clone()
    placed.weights.to_host(placed.where)
    assert not placed.device.handles
    assert torch.isfinite(placed.model.rotation).all()
    placed.weights.to_device()
    assert torch.equal(placed.answer(), placed.expected)


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_what_the_driver_refuses_leaves_weights_as_they_were(
    pool: int, function: str, nth: int
) -> None:
    placed = Placed(pool)
    placed.move(0.3)
    before, calls = (placed.held_bytes, placed.weights.away_bytes), 0

    def fails(asked: str) -> bool:
        nonlocal calls
        calls += asked == function
        return asked == function and calls == nth

    placed.device.fails = fails
    with pytest.raises(EngineError, match=function):
        placed.move(1.0)
    assert (placed.held_bytes, placed.weights.away_bytes) == before
    placed.move(1.0)
    placed.check()


def test_memory_that_is_not_given_back_is_in_the_books(pool: int) -> None:
    placed = Placed(pool)
    placed.device.fails = lambda asked: asked == "cuMemUnmap"
    placed.move(0.0)
    assert placed.weights.device_bytes == placed.held_bytes > 0
    assert (placed.weights.away_bytes, placed.weights.whole) == (0, False)
    placed.device.fails = lambda asked: False
    placed.move(1.0)
    placed.move(0.5)
    assert placed.weights.device_bytes == placed.held_bytes < ALL_BYTES
    placed.move(1.0)
    placed.check()


def test_a_model_that_was_made_for_inference_is_placed_as_well(pool: int) -> None:
    with torch.inference_mode():
        model = Layers()
    device, before = StandInDriver(300, chunk_bytes=4096), model.layers[1].weight.clone()
    memory = FixedMemory(CudaDriver(device, 0), model, CPU)
    assert memory.moves(model.layers[1].weight.untyped_storage())
    assert torch.equal(model.layers[1].weight, before)


def test_one_is_restored_from_what_another_has_left(pool: int) -> None:
    """From torch's own memory into virtual memory: both have the same layout."""
    placed = Placed(pool)
    other = Layers()
    weights = Weights(other, CPU, PooledMemory(pool))
    weights.fill(place(weights)).join()
    placed.weights.restore(place(placed.weights, whole=True))
    assert torch.equal(placed.model.layers[3].weight, other.layers[3].weight)
    with torch.inference_mode():
        other.rotation.copy_(placed.model.rotation)
        assert torch.equal(placed.answer(), other(placed.given))
