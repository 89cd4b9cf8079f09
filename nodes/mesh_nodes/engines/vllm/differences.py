"""Where the releases of vLLM differ in the private parts that mesh touches, and what is done then.

`SINCE` is the table: which part is there from which minor release on. `Shape` is what one release
has, and does with vLLM's objects what its release takes; it imports none of them. All else that
`internals` and `kv_pool` touch is alike in every release from `releases.OLDEST` to
`releases.NEWEST`. Before: `internals`, `kv_pool`, `device`. After: vLLM.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any, Protocol

from mesh.domain.values import dataclass
from mesh_nodes.engines.vllm.releases import Minor, found_release


class Part(StrEnum):
    """By its place in vLLM."""

    IDS_TO_ZERO = "Scheduler._get_new_block_ids_to_zero"
    MOVE_HASHES = "BlockPool.move_block_hashes"
    ONE_KV_BUFFER = "gpu_model_runner.allocate_kv_cache"
    WATERMARKING = "vllm.v1.watermarking"
    KERNEL_OVERRIDES = "Platform.register_triton_kernel_overrides"
    NO_COMMON_PREFIX = "SchedulerOutput without num_common_prefix_blocks"


SINCE: dict[Part, Minor] = {
    Part.IDS_TO_ZERO: (0, 26),
    Part.MOVE_HASHES: (0, 26),
    Part.ONE_KV_BUFFER: (0, 29),
    Part.WATERMARKING: (0, 30),
    Part.KERNEL_OVERRIDES: (0, 31),
    Part.NO_COMMON_PREFIX: (0, 32),
}


class KvSource(Protocol):
    """Where the KV cache's memory comes from."""

    def allocate(self, size_bytes: int) -> Any:
        """The buffer for all blocks, as int8."""
        ...

    def bind(self, layers: list[Any]) -> list[Any]:
        """What to use instead of vLLM's views of it, one for each layer, blocks first."""
        ...


Zeros = Callable[[Callable[[int], Any]], AbstractContextManager[object]]
"""Has buffers of so many bytes, which vLLM would fill with zeros, come from a function."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The private parts of one minor release of vLLM."""

    minor: Minor

    def has(self, part: Part) -> bool:
        return self.minor >= SINCE[part]

    def ids_to_zero(self, scheduler: Any) -> list[int] | None:
        """Blocks that the next iteration has to clear. Asked in each, or they pile up."""
        if self.has(Part.IDS_TO_ZERO):
            ids: list[int] | None = scheduler._get_new_block_ids_to_zero()
            return ids
        taken = scheduler.kv_cache_manager.take_new_block_ids()
        return (taken or None) if scheduler.needs_kv_cache_zeroing else None

    def output_fields(self) -> dict[str, Any]:
        """What a SchedulerOutput of one group of layers wants beside what all releases do."""
        return {} if self.has(Part.NO_COMMON_PREFIX) else {"num_common_prefix_blocks": [0]}

    def move_hashes(self, pool: Any, old: Any, new: Any) -> None:
        """What is found as the old block is found as the new one."""
        if self.has(Part.MOVE_HASHES):
            pool.move_block_hashes(old, new)
            return
        tokens = old.block_hash_num_tokens
        for key in pool._remove_cached_block_hashes(old):
            pool._insert_block_hash(key, new, num_tokens=tokens)

    def imported_on_demand(self) -> tuple[str, ...]:
        """Modules that not every release has."""
        return ("vllm.v1.watermarking",) if self.has(Part.WATERMARKING) else ()

    def register_kernels(self, platform: Any) -> None:
        """Have a platform's class look for its kernels now, and never again."""
        if self.has(Part.KERNEL_OVERRIDES):
            platform.register_triton_kernel_overrides()
            platform.register_triton_kernel_overrides = classmethod(lambda cls: None)

    @contextmanager
    def kv_from(self, runners: Any, source: KvSource, zeros: Zeros) -> Iterator[None]:
        """While this holds, the KV cache is the source's. `runners`: the module of vLLM's model
        runner. vLLM's own buffer would be written to at once, and be all there from then on.
        """
        if self.has(Part.ONE_KV_BUFFER):
            with _one_buffer(runners, source, zeros):
                yield
        else:
            with _buffer_a_layer(runners.GPUModelRunner, source, zeros):
                yield


@contextmanager
def _one_buffer(runners: Any, source: KvSource, zeros: Zeros) -> Iterator[None]:
    """All layers' views of one buffer, by a function that the module has imported."""
    allocate = runners.allocate_kv_cache

    def allocate_elsewhere(*arguments: Any, **options: Any) -> dict[str, Any]:
        with zeros(source.allocate):
            return _bound(source, allocate(*arguments, **options))

    runners.allocate_kv_cache = allocate_elsewhere
    try:
        yield
    finally:
        runners.allocate_kv_cache = allocate


@contextmanager
def _buffer_a_layer(runner: Any, source: KvSource, zeros: Zeros) -> Iterator[None]:
    """A buffer for each layer, and views later, by two methods: parts of one, one after another."""
    allocate, view = runner._allocate_kv_cache_tensors, runner._reshape_kv_cache_tensors

    def allocate_elsewhere(self: Any, config: Any) -> Any:
        buffer = source.allocate(sum(tensor.size for tensor in config.kv_cache_tensors))
        begin = 0

        def part(size_bytes: int) -> Any:
            nonlocal begin
            begin += size_bytes
            return buffer[begin - size_bytes : begin]

        with zeros(part):
            return allocate(self, config)

    def view_bound(self: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        return _bound(source, view(self, *arguments, **options))

    runner._allocate_kv_cache_tensors = allocate_elsewhere
    runner._reshape_kv_cache_tensors = view_bound
    try:
        yield
    finally:
        runner._allocate_kv_cache_tensors = allocate
        runner._reshape_kv_cache_tensors = view


def _bound(source: KvSource, views: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(views, source.bind(list(views.values())), strict=True))


def installed_shape() -> Shape:
    """Raises Unavailable when no vLLM is installed."""
    return Shape(found_release().minor)
