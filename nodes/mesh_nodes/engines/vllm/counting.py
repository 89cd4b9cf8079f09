"""Times what the operators of an iteration take, by the modules of the model.

A hook before and after each module whose name says what it computes; a module within another one
belongs to that. On a CPU a call that has returned is done, so that a clock tells. What modules do
not tell of, such as sampling and vLLM's own books, is the rest. Hooks stand for as long as an
iteration is counted. Before: `instance`. After: torch.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from mesh.domain.operators import Role

ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("embed_tokens", "wte"), Role.EMBEDDING),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), Role.NORM),
    **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), Role.NORM),
    **dict.fromkeys(("q_norm", "k_norm"), Role.NORM),
    "qkv_proj": Role.QKV,
    "rotary_emb": Role.ROPE,
    "attn": Role.ATTENTION,
    "o_proj": Role.OUTPUT,
    **dict.fromkeys(("gate", "router"), Role.GATE),
    "experts": Role.EXPERTS,
    **dict.fromkeys(("shared_expert", "shared_experts"), Role.SHARED_EXPERT),
    "gate_up_proj": Role.GATE_UP,
    "act_fn": Role.ACTIVATION,
    "down_proj": Role.DOWN,
    "logits_processor": Role.HEAD,
}
"""By the last part of the names that vLLM's decoders give their modules. Writing KV is part of
attention, and adding what a layer was given part of the norm behind it.
"""


@contextmanager
def counted(model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """A block in which the model computes; afterwards the seconds of each operator are in what it
    gives.
    """
    taken_s = defaultdict[str, float](float)
    began_s: list[float] = []

    def begin(*_: object) -> None:
        began_s.append(time.perf_counter())

    def end(role: Role, *_: object) -> None:
        start_s = began_s.pop()
        if not began_s:
            taken_s[role] += time.perf_counter() - start_s

    hooks = []
    for name, module in model.named_modules():
        role = ROLES.get(name.rpartition(".")[2])
        if role is not None:
            hooks.append(module.register_forward_pre_hook(begin))
            hooks.append(module.register_forward_hook(partial(end, role)))
    try:
        yield taken_s
    finally:
        for hook in hooks:
            hook.remove()
