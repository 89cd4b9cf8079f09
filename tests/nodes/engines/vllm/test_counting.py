"""What hooks on modules tell of operators."""

import time

import torch

from mesh.domain.operators import Role
from mesh_nodes.engines.vllm.counting import counted


class _Sleeps(torch.nn.Module):  # type: ignore[misc]
    """Takes 10 ms, and what it holds as long."""

    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self) -> None:
        time.sleep(0.01)
        for part in self.children():
            part()


def test_a_module_within_another_counts_for_that_one_alone() -> None:
    shared = _Sleeps(gate_up_proj=_Sleeps(), act_fn=_Sleeps())
    model = _Sleeps(layer=_Sleeps(attn=_Sleeps(), shared_expert=shared), unnamed=_Sleeps())
    with counted(model) as taken_s:
        start_s = time.perf_counter()
        model()
        elapsed_s = time.perf_counter() - start_s
    assert set(taken_s) == {Role.ATTENTION, Role.SHARED_EXPERT}
    assert taken_s[Role.SHARED_EXPERT] >= 0.03
    assert sum(taken_s.values()) <= elapsed_s - 0.03, "two without a role, and the model itself"
    assert not shared._forward_hooks, "they are gone with the block"
