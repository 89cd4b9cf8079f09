"""Weights leave the device and come back into the same tensors, whoever shares their memory."""

import torch

from mesh_nodes.engines.vllm.weights import Weights

CPU = torch.device("cpu")


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


def test_weights_that_slept_compute_the_same() -> None:
    torch.manual_seed(1)
    model, given = Tied(), torch.randn(3, 8)
    other_view = model.rows[0]
    with torch.inference_mode():
        expected = model(given)
    weights = Weights(model, CPU)
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


def test_a_model_that_was_made_for_inference_sleeps_as_well() -> None:
    with torch.inference_mode():
        model = Tied()
        before = [parameter.clone() for parameter in model.parameters()]
    weights = Weights(model, CPU)
    weights.to_host()
    weights.to_device()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_a_second_sleep_copies_only_what_may_have_changed() -> None:
    model = Tied()
    weights = Weights(model, CPU)
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
    assert torch.equal(model.scale, torch.full((8,), 5.0))
    assert torch.equal(model.rows, before)
    model.register_buffer("more", torch.ones(4))
    weights.to_host()
    assert weights._host is not copy, "it has no room for what is new"
    weights.to_device()
    assert torch.equal(model.more, torch.ones(4))


def test_what_is_not_on_the_device_stays() -> None:
    model = Tied()
    weights = Weights(model, torch.device("meta"))
    assert weights.device_bytes == 0
    weights.to_host()
    assert model.rows.untyped_storage().nbytes() == 4 * 48
