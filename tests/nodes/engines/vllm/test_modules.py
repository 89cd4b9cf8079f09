"""What a load changes beside parameters is seen, wherever vLLM keeps it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mesh_nodes.engines.vllm.modules import changes, held_beside


class Kernel:
    def __init__(self) -> None:
        self.scale = 1.0
        self.inner: Any = None
        self.packed: Any = None


Kernel.__module__ = "vllm.made_up"


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.kernel = Kernel()
        self.kernel.inner = Kernel()
        self.kernel.packed = {"scales": [torch.ones(2)]}
        self.folded: Any = None
        self.register_buffer("cache", torch.zeros(10_000, dtype=torch.bfloat16), persistent=False)


def change_parameter(model: Any) -> None:
    model[0].weight.data.fill_(5.0)
    model[0].weight = torch.nn.Parameter(torch.zeros(2, 8))
    model[0].view = model[0].weight[0]


def change_number(model: Any) -> None:
    model[1].kernel.inner.scale = 0.5


def change_buffer(model: Any) -> None:
    model[1].cache.fill_(1.0)


def pack(model: Any) -> None:
    """What was there is changed, and more comes, some of it too deep."""
    packed = model[1].kernel.packed
    packed["scales"][0].fill_(2.0)
    packed[7] = (torch.ones(2), [0.5])
    packed["self"] = packed


def fold(model: Any) -> None:
    model[0].folded = model[0].weight.data * 2


def forget(model: Any) -> None:
    del model[0].folded


@pytest.mark.parametrize(
    ("load", "told"),
    [
        (change_parameter, (("0.view", "of a parameter"),)),
        (change_number, (("1.kernel.inner.scale", "0.5"),)),
        (forget, (("0.folded", "gone"),)),
    ],
)
def test_changes_are_told_by_name(
    load: Callable[[Any], None], told: tuple[tuple[str, str], ...]
) -> None:
    model = torch.nn.Sequential(Layer(), Layer())
    before = held_beside(model)
    load(model)
    assert changes(before, held_beside(model)) == told


def test_what_containers_hold_is_seen_as_deep_as_may_be() -> None:
    model = torch.nn.Sequential(Layer(), Layer())
    before = held_beside(model)
    pack(model)
    names = [name for name, _ in changes(before, held_beside(model))]
    assert names == ["1.kernel.packed.7.0", "1.kernel.packed.scales.0"]


@pytest.mark.parametrize("load", [change_buffer, fold])
def test_tensors_are_told_apart_by_what_is_in_them(load: Callable[[Any], None]) -> None:
    seen = []
    for value in (1.0, 1.0, 2.0):
        model = torch.nn.Sequential(Layer(), Layer())
        before = held_beside(model)
        model[0].weight.data.fill_(value)
        load(model)
        model[1].cache *= value
        seen.append(changes(before, held_beside(model)))
        (told, *_) = seen[-1]
        assert told[0] in ("0.folded", "1.cache")
    assert seen[0] == seen[1] != seen[2]


def test_what_cannot_be_looked_at_is_like_nothing() -> None:
    model = torch.nn.Sequential(Layer())
    model[0].odd = torch.eye(2).to_sparse()
    before = held_beside(model)
    ((name, _),) = changes(before, held_beside(model))
    assert name == "0.odd"


def test_looking_changes_nothing() -> None:
    """Not even that a buffer can be emptied."""
    model = torch.nn.Sequential(Layer())
    model[0].other = SimpleNamespace(scale=1.0)
    assert held_beside(model) == held_beside(model)
    model[0].cache.untyped_storage().resize_(0)
