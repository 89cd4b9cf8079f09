"""Weights leave the device and come back into the same tensors, whoever shares their memory."""

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from mesh.domain.errors import EngineError, OutOfMemory
from mesh_nodes.engines.vllm.host_pool import CHUNK_BYTES
from mesh_nodes.engines.vllm.messages import WHOLE, Range
from mesh_nodes.engines.vllm.pooled import PooledMemory, pooled_memory
from mesh_nodes.engines.vllm.weights import Weights
from tests.support.cuda_driver import StandInDriver


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A GPU as well, where there is one."""
    return torch.device(request.param)


@pytest.fixture
def pool() -> Iterator[int]:
    """The descriptor of one of two chunks."""
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, 2 * CHUNK_BYTES)
    yield descriptor
    os.close(descriptor)


class Tied(torch.nn.Module):  # type: ignore[misc]
    """Two layers that are one matrix, a view into a larger one, a buffer, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.rows = torch.nn.Parameter(torch.randn(6, 8)[2:4], requires_grad=False)
        self.none = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_buffer("scale", torch.randn(8))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(given)) * self.scale) @ self.rows.T


def made_on(device: torch.device) -> Tied:
    with device:
        return Tied()


def zero(model: Tied) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def weights_of(model: Tied, device: torch.device, pool: int) -> Weights:
    return Weights(model, device, pooled_memory(pool, device))


def place(weights: Weights, *, offset: int = 0, whole: bool = False) -> Range:
    return Range(offset=offset, size_bytes=CHUNK_BYTES, layout=weights.layout(), whole=whole)


def is_whole(pool: int) -> bool:
    return os.pread(pool, len(WHOLE), CHUNK_BYTES - len(WHOLE)) == WHOLE


def test_weights_that_slept_compute_the_same(device: torch.device, pool: int) -> None:
    torch.manual_seed(1)
    model, given = made_on(device), torch.randn(3, 8, device=device)
    other_view = model.rows[0]
    with torch.inference_mode():
        expected = model(given)
    weights = weights_of(model, device, pool)
    where: Range | None = place(weights)
    assert where is not None
    assert sum(where.layout.sizes_bytes) == 4 * (64 + 8 + 48)
    assert weights.beside_bytes == 4 * 8
    for _ in range(2):
        assert weights.device_bytes == 4 * (64 + 8 + 48 + 8)
        weights.to_host(where)
        assert weights.device_bytes == 0
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
        weights.to_device()
        with torch.inference_mode():
            assert torch.equal(model(given), expected)
        where = None
    assert torch.equal(other_view, model.rows[0])


def test_weights_go_and_come_by_whole_tensors(device: torch.device, pool: int) -> None:
    """The rows take 192 bytes, the matrix 256, the bias and the buffer 32 each."""
    model, given = made_on(device), torch.randn(3, 8, device=device)
    with torch.inference_mode():
        expected = model(given)
    weights = weights_of(model, device, pool)
    whole_bytes = 4 * (64 + 8 + 48 + 8)
    where: Range | None = place(weights)
    for share, there_bytes in ((0.9, 448), (0.5, 192), (0.95, 480), (0.1, 0), (0.4, 192), (0.2, 0)):
        weights.move(share, where)
        assert weights.device_bytes == there_bytes
        assert weights.away_bytes == whole_bytes - there_bytes
        where = None
    weights.move(1.0)
    assert (weights.away_bytes, weights.device_bytes) == (0, whole_bytes)
    with torch.inference_mode():
        assert torch.equal(model(given), expected)


def test_a_model_that_was_made_for_inference_sleeps_as_well(
    device: torch.device, pool: int
) -> None:
    with torch.inference_mode():
        model = made_on(device)
        before = [parameter.clone() for parameter in model.parameters()]
    weights = weights_of(model, device, pool)
    weights.to_host(place(weights))
    weights.to_device()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("ahead", [True, False], ids=["filled ahead", "filled by a sleep"])
def test_a_sleep_copies_only_what_may_have_changed_since(
    device: torch.device, pool: int, ahead: bool
) -> None:
    model = made_on(device)
    weights, before = weights_of(model, device, pool), model.rows.clone()
    assert not is_whole(pool)
    if ahead:
        weights.fill(place(weights)).join()
    else:
        weights.to_host(place(weights))
        weights.to_device()
    assert is_whole(pool)
    with torch.no_grad():
        model.scale.fill_(5.0)
        # No engine does that; it shows that nothing is copied.
        model.rows.fill_(7.0)
    model.register_buffer("more", torch.ones(4, device=device))
    weights.to_host()
    weights.to_device()
    assert torch.equal(model.scale, torch.full((8,), 5.0, device=device))
    assert torch.equal(model.more, torch.ones(4, device=device))
    assert torch.equal(model.rows, before)


def test_a_model_is_restored_from_what_another_has_left(device: torch.device, pool: int) -> None:
    """It sleeps without a copy, too."""
    first, second = made_on(device), made_on(device)
    weights = weights_of(first, device, pool)
    weights.fill(place(weights)).join()
    zero(second)
    restored = weights_of(second, device, pool)
    restored.restore(place(weights, whole=True))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    before = second.rows.clone()
    second.rows.data.fill_(7.0)
    restored.to_host()
    restored.to_device()
    assert torch.equal(second.rows, before)


def test_what_stands_there_has_to_be_the_same(device: torch.device, pool: int) -> None:
    first, second = made_on(device), made_on(device)
    weights = weights_of(first, device, pool)
    second.rows = torch.nn.Parameter(torch.randn(4, 4, device=device), requires_grad=False)
    other, before = weights_of(second, device, pool), second.rows.clone()
    with pytest.raises(EngineError, match=r"not this load's: \('rows', 'torch.float32 \(2, 8\)"):
        other.restore(place(weights, whole=True))
    with pytest.raises(EngineError, match="is one for others"):
        other.to_host(place(weights))
    assert torch.equal(second.rows, before)
    same = Weights(first, device, pooled_memory(pool, device), (("attention.scale", "0.5"),))
    with pytest.raises(EngineError, match=r"\('attention.scale', '0.5'\) differs"):
        same.restore(place(weights, whole=True))


def test_without_a_place_nothing_sleeps(device: torch.device, pool: int) -> None:
    model = made_on(device)
    with pytest.raises(EngineError, match="no place"):
        weights_of(model, device, pool).to_host()
    weights = Weights(model, device)
    with pytest.raises(EngineError, match="no part in the host's pool"):
        weights.to_host(place(weights))


def test_without_room_on_the_device_weights_stay_away(
    device: torch.device, pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had come already go again, and the next time all of them come."""
    model, given = made_on(device), torch.randn(3, 8, device=device)
    with torch.inference_mode():
        expected = model(given)
    weights = weights_of(model, device, pool)
    weights.to_host(place(weights))
    away_bytes, resize = weights.away_bytes, torch.UntypedStorage.resize_
    sizes: list[int] = []

    def until_the_third(storage: torch.UntypedStorage, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 3:
            raise torch.OutOfMemoryError("no room")
        resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", until_the_third)
        with pytest.raises(OutOfMemory):
            weights.to_device()
    assert (weights.away_bytes, weights.device_bytes) == (away_bytes, 0)
    weights.to_device()
    assert (weights.away_bytes, weights.device_bytes) == (0, away_bytes)
    with torch.inference_mode():
        assert torch.equal(model(given), expected)


def test_what_is_not_on_the_device_stays(pool: int) -> None:
    model = Tied()
    weights = weights_of(model, torch.device("meta"), pool)
    assert weights.device_bytes == 0
    weights.to_host(place(weights))
    assert model.rows.untyped_storage().nbytes() == 4 * 48


def test_a_range_is_pinned_once_and_a_second_one_is_refused(pool: int) -> None:
    driver, model = StandInDriver(1), Tied()
    memory = PooledMemory(pool, driver)
    weights = Weights(model, torch.device("cpu"), memory)
    where = place(weights, offset=CHUNK_BYTES)
    for _ in range(2):
        weights.to_host(where)
        weights.to_device()
    assert list(driver.pinned.values()) == [CHUNK_BYTES]
    assert memory.map(where).data_ptr() in driver.pinned
    with pytest.raises(EngineError, match="this process maps the pool at"):
        memory.map(place(weights))


def test_what_the_driver_does_not_pin_is_used_as_it_is(
    pool: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver, model = StandInDriver(1, fails=lambda asked: asked == "cuMemHostRegister"), Tied()
    memory = PooledMemory(pool, driver)
    weights, before = Weights(model, torch.device("cpu"), memory), model.rows.clone()
    with caplog.at_level(logging.WARNING):
        weights.to_host(place(weights))
    weights.to_device()
    assert torch.equal(model.rows, before)
    assert not memory.pinned
    assert "2097152 bytes are not pinned: the CUDA driver refuses cuMemHostRegister" in caplog.text


def test_a_pool_that_ends_before_the_range_is_told(pool: int) -> None:
    weights = weights_of(Tied(), torch.device("cpu"), pool)
    with pytest.raises(EngineError, match="cannot be mapped"):
        weights.to_host(place(weights, offset=2 * CHUNK_BYTES))
