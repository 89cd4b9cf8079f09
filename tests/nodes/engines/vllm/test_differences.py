"""Each known release is given what it takes: stand-ins have the parts of that release alone.

`test_parts` holds the installed one to the table.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_nodes.engines.vllm.differences import SINCE, Part, Shape
from mesh_nodes.engines.vllm.releases import NEWEST, OLDEST

MINORS = [(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
SIZES = {"layers.0": 6, "layers.1": 4}
"""Bytes of each layer's cache."""

shapes = pytest.mark.parametrize("shape", [Shape(minor) for minor in MINORS], ids=str)


class Zeros:
    """What stands in for torch: `make` is asked for buffers while `elsewhere` holds."""

    def __init__(self) -> None:
        self.make: Callable[[int], Any] = lambda size: pytest.fail("vLLM's own memory")

    @contextmanager
    def elsewhere(self, make: Callable[[int], Any]) -> Iterator[None]:
        before, self.make = self.make, make
        yield
        self.make = before


class Source:
    """One buffer, which says of each view which bytes of it that is."""

    def allocate(self, size_bytes: int) -> range:
        assert size_bytes == sum(SIZES.values())
        return range(size_bytes)

    def bind(self, layers: list[range]) -> list[str]:
        return [f"{layer.start} to {layer.stop}" for layer in layers]


def runners(shape: Shape, zeros: Zeros) -> Any:
    """vLLM's module as the release has it, with what it makes of its buffers."""
    config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=s) for s in SIZES.values()])

    class GPUModelRunner:
        """The runner of releases in which each layer has a buffer."""

        def _allocate_kv_cache_tensors(self, config: Any) -> dict[str, Any]:
            sizes = [tensor.size for tensor in config.kv_cache_tensors]
            return dict(zip(SIZES, map(zeros.make, sizes), strict=True))

        def _reshape_kv_cache_tensors(self, raw: dict[str, Any], sizes: list[int]) -> Any:
            return raw

        def initialize(self) -> Any:
            return self._reshape_kv_cache_tensors(self._allocate_kv_cache_tensors(config), [16])

    def allocate_kv_cache(*arguments: Any, **options: Any) -> dict[str, Any]:
        buffer = zeros.make(sum(SIZES.values()))
        return {"layers.0": buffer[:6], "layers.1": buffer[6:]}

    if not shape.has(Part.ONE_KV_BUFFER):
        return SimpleNamespace(
            GPUModelRunner=GPUModelRunner, initialize=GPUModelRunner().initialize
        )
    module = SimpleNamespace(allocate_kv_cache=allocate_kv_cache)
    module.initialize = lambda: module.allocate_kv_cache(config, kernel_block_sizes=[16])
    return module


@shapes
def test_the_kv_cache_is_the_sources_and_afterwards_vllms_own(shape: Shape) -> None:
    zeros = Zeros()
    module = runners(shape, zeros)
    with shape.kv_from(module, Source(), zeros.elsewhere):
        assert module.initialize() == {"layers.0": "0 to 6", "layers.1": "6 to 10"}
    with pytest.raises(pytest.fail.Exception, match="vLLM's own memory"):
        module.initialize()


@shapes
@pytest.mark.parametrize("zeroes", [False, True])
def test_new_blocks_are_asked_for_each_time_and_told_where_they_are_to_be_cleared(
    shape: Shape, zeroes: bool
) -> None:
    asked = []

    def take_new_block_ids() -> list[int]:
        asked.append("taken")
        return [7]

    manager = SimpleNamespace(take_new_block_ids=take_new_block_ids)
    scheduler = SimpleNamespace(kv_cache_manager=manager, needs_kv_cache_zeroing=zeroes)
    if shape.has(Part.IDS_TO_ZERO):
        own = SimpleNamespace(
            _get_new_block_ids_to_zero=lambda: take_new_block_ids() if zeroes else None
        )
        assert shape.ids_to_zero(own) == ([7] if zeroes else None)
    else:
        assert shape.ids_to_zero(scheduler) == ([7] if zeroes else None)
        assert asked == ["taken"]


@shapes
def test_what_is_found_as_one_block_is_found_as_another(shape: Shape) -> None:
    told: list[Any] = []
    old, new = SimpleNamespace(block_hash_num_tokens=32), SimpleNamespace()
    pool = SimpleNamespace(
        _remove_cached_block_hashes=lambda block: ["a", "b"],
        _insert_block_hash=lambda key, block, num_tokens: told.append((key, block, num_tokens)),
    )
    if shape.has(Part.MOVE_HASHES):
        pool = SimpleNamespace(move_block_hashes=lambda *blocks: told.append(blocks))
    shape.move_hashes(pool, old, new)
    moved = [(old, new)] if shape.has(Part.MOVE_HASHES) else [("a", new, 32), ("b", new, 32)]
    assert told == moved


@shapes
def test_kernels_are_looked_for_once_where_a_release_does_it_in_every_worker(shape: Shape) -> None:
    looked = []

    class Platform:
        if shape.has(Part.KERNEL_OVERRIDES):

            @classmethod
            def register_triton_kernel_overrides(cls) -> None:
                looked.append("looked")

    shape.register_kernels(Platform)
    assert hasattr(Platform, "register_triton_kernel_overrides") == bool(looked)
    if looked:
        Platform.register_triton_kernel_overrides()
        assert looked == ["looked"]


def test_a_newer_release_than_is_known_is_taken_for_the_newest() -> None:
    assert {part for part in Part if Shape((0, 40)).has(part)} == set(SINCE)
    assert not any(Shape(OLDEST).has(part) for part in Part)
