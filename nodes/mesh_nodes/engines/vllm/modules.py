"""What the modules of a model hold beside their parameters: buffers, other tensors, numbers, words.

Loading may change these, too: scales that become plain numbers, matrices that are kept folded.
What a load has changed of them is compared with what another one of the same model has; only where
that is the same are parameters all that there is to restore. Looked at are attributes, vLLM's own
objects in them, lists, tuples and dicts; not seen is what closures, sets or objects of other
libraries hold, and what lies deeper or further back than the bounds say. Before: `loader`, which
looks before and after. After: torch, and what vLLM hangs on its modules.
"""

import hashlib
import os
from collections.abc import Iterator
from itertools import islice

import torch

_DEPTH = 3
"""Objects and containers that a module holds, such as its kernels, and what those hold."""
_ITEMS_MAX = 1024
"""At most so many items of a container are looked at, from the first."""
_SAMPLES_MAX = 4096
"""Elements of a tensor that are looked at: loading changes all of one, or none."""


def held_beside(model: torch.nn.Module) -> dict[str, str]:
    """By names, in words that differ if what they stand for does."""
    parameters = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    seen: set[int] = set()
    held = {}
    for name, module in model.named_modules():
        for path, value in _values(name, module, _DEPTH, seen):
            held[path] = _words(value, parameters)
    return held


def changes(before: dict[str, str], after: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """What came, went or is another; to what."""
    names = sorted({*before, *after})
    return tuple((n, after.get(n, "gone")) for n in names if before.get(n) != after.get(n))


def _values(name: str, held: object, depth: int, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Each once, wherever it is met first."""
    seen.add(id(held))
    for key, value in _parts(held):
        path = f"{name}.{key}"
        if isinstance(value, torch.Tensor | int | float | str | bool | None):
            yield path, value
        elif depth and id(value) not in seen and _has_parts(value):
            yield from _values(path, value, depth - 1, seen)


def _has_parts(value: object) -> bool:
    if isinstance(value, torch.nn.Module | type):
        return False
    return isinstance(value, list | tuple | dict) or type(value).__module__.startswith("vllm")


def _parts(held: object) -> list[tuple[str, object]]:
    """By their names, keys or places."""
    if isinstance(held, list | tuple):
        return [(str(place), value) for place, value in enumerate(held[:_ITEMS_MAX])]
    if isinstance(held, dict):
        return [(str(key), value) for key, value in islice(held.items(), _ITEMS_MAX)]
    attributes = dict(getattr(held, "__dict__", {}))
    for own in ("_parameters", "_modules", "training"):
        attributes.pop(own, None)
    attributes |= attributes.pop("_buffers", None) or {}
    return sorted(attributes.items())


def _words(value: object, parameters: set[int]) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    what = f"{value.dtype} {tuple(value.shape)}"
    if value.is_meta or not value.numel():
        return what
    try:
        if value.untyped_storage().data_ptr() in parameters:
            return "of a parameter"
        flat = value.detach().reshape(-1)
        # A copy: what numpy has once seen cannot be emptied any more.
        some = flat[:: -(-flat.numel() // _SAMPLES_MAX)].clone().cpu()
        content = some.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):
        # A kind of its own, which may be anything: nothing is like it.
        content = os.urandom(16)
    return f"{what} {hashlib.sha256(content).hexdigest()}"
