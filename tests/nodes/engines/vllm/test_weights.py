"""Weights leave the device and come back into the same tensors, whoever shares their memory."""

import pytest
import torch

from mesh_nodes.engines.vllm.weights import Weights


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A GPU as well, where there is one."""
    return torch.device(request.param)


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


def test_weights_that_slept_compute_the_same(device: torch.device) -> None:
    torch.manual_seed(1)
    model, given = made_on(device), torch.randn(3, 8, device=device)
    other_view = model.rows[0]
    with torch.inference_mode():
        expected = model(given)
    weights = Weights(model, device)
    held = 4 * (64 + 8 + 48 + 8)
    for _ in range(2):
        assert weights.device_bytes == held
        weights.to_host()
        assert weights.device_bytes == 0
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
        weights.to_device()
        with torch.inference_mode():
            assert torch.equal(model(given), expected)
    assert torch.equal(other_view, model.rows[0])


def test_a_model_that_was_made_for_inference_sleeps_as_well(device: torch.device) -> None:
    with torch.inference_mode():
        model = made_on(device)
        before = [parameter.clone() for parameter in model.parameters()]
    weights = Weights(model, device)
    weights.to_host()
    weights.to_device()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_a_second_sleep_copies_only_what_may_have_changed(device: torch.device) -> None:
    model = made_on(device)
    weights = Weights(model, device)
    weights.to_host()
    weights.to_device()
    copy, before = weights._host, model.rows.clone()
    with torch.no_grad():
        model.scale.fill_(5.0)
        # No engine does that; it shows that nothing is copied.
        model.rows.fill_(7.0)
    weights.to_host()
    assert weights._host is copy
    weights.to_device()
    assert torch.equal(model.scale, torch.full((8,), 5.0, device=device))
    assert torch.equal(model.rows, before)
    model.register_buffer("more", torch.ones(4, device=device))
    weights.to_host()
    assert weights._host is not copy, "it has no room for what is new"
    weights.to_device()
    assert torch.equal(model.more, torch.ones(4, device=device))


def test_memory_that_was_reserved_is_what_the_first_sleep_copies_into(device: torch.device) -> None:
    model = made_on(device)
    weights = Weights(model, device)
    before = model.rows.clone()
    weights.reserve()
    with torch.no_grad():
        model.scale.fill_(5.0)
    assert weights._reserving is not None
    weights._reserving.join()
    reserved = weights._host
    assert reserved is not None
    weights.to_host()
    assert weights._host is reserved
    weights.to_device()
    assert torch.equal(model.rows, before)
    assert torch.equal(model.scale, torch.full((8,), 5.0, device=device))


def test_what_is_not_on_the_device_stays() -> None:
    model = Tied()
    weights = Weights(model, torch.device("meta"))
    assert weights.device_bytes == 0
    weights.to_host()
    assert model.rows.untyped_storage().nbytes() == 4 * 48
