"""An engine without a model, but for what its calls cost: memory and requests are really counted.

What the cost-model engine and the scripted engine of the tests have in common. It owns the loaded
instances and bounds what they take together. Before: the engines that derive from it, which say how
long calls take and which of them fail. After: `sequences`, which computes what an iteration yields.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.ids import InstanceId, ModelId, RequestId
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.steps import KvChunk, KvHeader, LoadTier, PrefixChange, part_bytes
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kept_caches import KeptCaches
from mesh.memory.kv_blocks import KvBlocks
from mesh.memory.shared_weights import SharedWeights, counted_once
from mesh.runtime.engine import Ended, EngineRequest, InstanceMemory, LoadOrder, Progress
from mesh.runtime.kv_layout import check_header, check_range, checked_chunks, chunk_of
from mesh.runtime.measurable import check_measurable, no_counters
from mesh.sim.sequences import CountedPlaces, Instance

_SEQUENCES = attrgetter("sequences")
NO_LENGTHS: Mapping[RequestId, int] = MappingProxyType({})


class VirtualEngine:
    """See `mesh.runtime.engine.Engine`, of which loads, steps, measuring and resizes are left to
    who derives from it. `memory_bytes` bounds what all instances take together; None: nothing does.
    Those of a model with one context limit share what their footprints say that they do. `lengths`
    are tokens after which answers end by themselves; others go on as long as they may.
    """

    def __init__(
        self, memory_bytes: int | None, lengths: Mapping[RequestId, int] = NO_LENGTHS
    ) -> None:
        self._memory_bytes = memory_bytes
        self._lengths = lengths
        self._instances: dict[InstanceId, Instance] = {}
        self._budget = CacheBudget()
        self._kept = KeptCaches[Instance]()
        self._ended: Ended = lambda instance_id, error: None

    def watch(self, ended: Ended) -> None:
        self._ended = ended

    def count_operators(
        self, instance_id: InstanceId, shape: IterationShape, cores: int | None = None
    ) -> CountedIteration:
        raise no_counters("an engine without a model")

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        progress("nothing to prepare", 1.0)

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool:
        return True

    def tier_of(self, order: LoadOrder) -> LoadTier:
        return LoadTier.HOST if self._is_shared(order) else LoadTier.DISK

    def unload(self, instance_id: InstanceId) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            for request_id in tuple(instance.sequences):
                instance.drop(request_id)
            instance.pool.outlive()
            self._kept.put(instance.order, instance)

    def lose(self, instance_id: InstanceId) -> None:
        """The instance ends by itself, as an engine process that is killed, and its memory is free
        at once.
        """
        self._instances.pop(instance_id).pool.close()
        self._ended(instance_id, EngineError(f"instance {instance_id} has ended: it was killed"))

    def swap(self, instance_id: InstanceId, share: float) -> None:
        instance = self._instance(instance_id)
        footprint = instance.footprint
        weights_bytes = footprint.stays_bytes + part_bytes(footprint.weights_bytes, share)
        more_bytes, shared = weights_bytes - instance.pool.weights_bytes, instance.pool.shared
        if shared is not None and self._is_shared(instance.order):
            more_bytes -= shared.size_bytes
        self._budget.begin_load(instance_id, max(more_bytes, 0))
        try:
            if more_bytes > 0:
                self._claim(more_bytes, instance_id)
            instance.pool.weights_bytes = weights_bytes
        finally:
            self._budget.end_load(instance_id)

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> int:
        instance = self._instance(instance_id)
        given = len(request.prompt_tokens) + len(request.output_tokens)
        known = instance.sequences.get(request.request_id)
        if known is not None and not (known.paused or request.paused):
            raise EngineError(f"request {request.request_id} is already there")
        if not request.prompt_tokens:
            raise EngineError(f"request {request.request_id} has no prompt tokens")
        if given >= instance.order.context_tokens_max:
            raise EngineError(
                f"request {request.request_id}: {given} tokens leave no room in "
                f"{instance.order.context_tokens_max} of context"
            )
        if len(request.output_tokens) >= request.sampling.max_tokens:
            raise EngineError(f"request {request.request_id} has all of its tokens already")
        return instance.add(request, self._lengths.get(request.request_id))

    def export_kv(
        self, instance_id: InstanceId, request_id: RequestId, first_block: int, blocks: int
    ) -> tuple[KvHeader, Iterator[KvChunk]]:
        instance = self._instance(instance_id)
        sequence = instance.sequences.get(request_id)
        computed = 0 if sequence is None else sequence.computed
        block_tokens = instance.footprint.block_tokens
        check_range(request_id, first_block, blocks, computed // block_tokens)
        pages = (
            () if sequence is None else map(sequence.page, range(first_block, first_block + blocks))
        )
        chunks = map(chunk_of, range(first_block, first_block + blocks), pages)
        return instance.header(first_block, blocks), chunks

    def import_kv(
        self,
        instance_id: InstanceId,
        request: EngineRequest,
        header: KvHeader,
        chunks: Iterable[KvChunk],
    ) -> Generator[None, None, int]:
        yield from ()  # It takes no time, so that nothing can come between two blocks.
        instance = self._instance(instance_id)
        if request.request_id in instance.sequences:
            raise EngineError(f"request {request.request_id} is already there")
        tokens = check_header(header, instance.header(0, 0), request)
        pages = list(checked_chunks(header, chunks))
        self.submit(instance_id, request)
        try:
            return instance.receive(request.request_id, tokens, pages)
        except EngineError:
            instance.drop(request.request_id)
            raise

    def kv_block_bytes(self, instance_id: InstanceId) -> int:
        """What a block of an instance would take; 0 of one that is not loaded."""
        instance = self._instances.get(instance_id)
        return 0 if instance is None else instance.footprint.kv_block_bytes

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.drop(request_id)

    def bound_memory(self, memory_bytes: int) -> None:
        self._budget.bound(memory_bytes)

    def tell_prefixes(self) -> Mapping[InstanceId, PrefixChange]:
        told = ((i, instance.pool.tell()) for i, instance in self._instances.items())
        changed = {instance_id: change for instance_id, change in told if change is not None}
        return {**changed, **self._kept.tell()}

    def kept_bytes(self) -> int:
        return self._kept.held_bytes

    def memory(self) -> tuple[InstanceMemory, ...]:
        found = [instance for _, instance in sorted(self._instances.items())]
        held = [instance.memory() for instance in found]
        if not any(instance.pool.shared for instance in found):
            return tuple(held)
        sizes = [(m.weights_bytes, i.pool.shared) for m, i in zip(held, found, strict=True)]
        return tuple(
            replace(m, weights_bytes=weights_bytes)
            for m, weights_bytes in zip(held, counted_once(sizes), strict=True)
        )

    def close(self) -> None:
        self._instances.clear()
        self._kept.close()

    # For those who look at it from outside.

    def has_requests(self) -> bool:
        return any(map(_SEQUENCES, self._instances.values()))

    def instances(self) -> Iterator[tuple[InstanceId, Instance]]:
        return iter(self._instances.items())

    def has_instances(self) -> bool:
        return bool(self._instances)

    def requests(self) -> int:
        """How many requests were submitted and have not ended."""
        return sum(len(instance.sequences) for instance in self._instances.values())

    def request_ids(self) -> list[RequestId]:
        """The ids of all requests that are in it."""
        return [r for instance in self._instances.values() for r in instance.sequences]

    def held_bytes(self) -> int:
        """What all instances take together."""
        held_bytes = sum(m.weights_bytes + m.kv_held_bytes for m in self.memory())
        return held_bytes + self.kept_bytes()

    # For those who derive from it.

    def _instance(self, instance_id: InstanceId) -> Instance:
        if instance_id not in self._instances:
            raise EngineError(f"instance {instance_id} is not loaded")
        return self._instances[instance_id]

    def _computing(self, instance_id: InstanceId) -> Instance:
        """The instance, if its weights are on the device."""
        instance = self._instance(instance_id)
        if instance.pool.weights_bytes < instance.footprint.instance_bytes(0):
            raise EngineError(f"weights of instance {instance_id} are off the device")
        return instance

    def _is_shared(self, order: LoadOrder) -> bool:
        """Whether what it asks for would share an instance's weights."""
        return any(
            i.pool.shared is not None and i.pool.shared.key == kind_of(order)
            for i in self._instances.values()
            if i.pool.weights_bytes > i.footprint.stays_bytes
        )

    def _enter(self, order: LoadOrder, footprint: Footprint) -> tuple[int, ...]:
        """The instance is loaded, if it is not there and there is memory for it. Returns the
        digests of the keys that an earlier one has left to it.
        """
        if order.instance_id in self._instances:
            raise EngineError(f"instance {order.instance_id} is already loaded")
        weights_bytes = footprint.stays_bytes + (0 if order.swapped else footprint.weights_bytes)
        wanted_bytes, shared = weights_bytes + order.kv_blocks * footprint.kv_block_bytes, None
        if footprint.shared_bytes:
            shared = SharedWeights(key=kind_of(order), size_bytes=footprint.shared_bytes)
            wanted_bytes -= footprint.shared_bytes if self._is_shared(order) else 0
        kept = self._kept.take(order)
        pool = kept.pool if kept is not None else self._fresh_pool(order.kv_blocks, footprint)
        kv_bytes = order.kv_blocks * footprint.kv_block_bytes
        self._budget.begin_load(order.instance_id, wanted_bytes - kv_bytes)
        try:
            # What it finds is not held by what is kept any more, and lies beyond its own.
            self._claim(wanted_bytes + pool.extra * pool.block_bytes, order.instance_id)
        except OutOfMemory:
            pool.close()
            raise
        finally:
            self._budget.end_load(order.instance_id)
        self._instances[order.instance_id] = Instance(order, footprint, pool)
        return pool.begin_again(weights_bytes, shared)

    def _fresh_pool(self, kv_blocks: int, footprint: Footprint) -> KvBlocks:
        return KvBlocks(
            kv_blocks,
            CountedPlaces(),
            self._budget,
            block_bytes=footprint.kv_block_bytes,
            overflows=True,
        )

    def _resize(self, instance_id: InstanceId, kv_blocks: int) -> tuple[int, int]:
        """To so many blocks, or to those in use; the bytes of the cache before and after."""
        instance = self._instance(instance_id)
        block_bytes, before = instance.footprint.kv_block_bytes, instance.pool.blocks
        blocks = max(kv_blocks, instance.pool.used, 1)
        instance.pool.resize(blocks)
        if blocks > before and self._free_bytes() < 0:
            instance.pool.resize(before)
            self._claim((blocks - before) * block_bytes, instance_id)
        return before * block_bytes, blocks * block_bytes

    def _measurable(self, instance_id: InstanceId, shape: IterationShape) -> Instance:
        """The instance, if an iteration of this shape can be computed on it now."""
        instance = self._computing(instance_id)
        check_measurable(
            instance_id,
            shape,
            context_tokens_max=instance.order.context_tokens_max,
            batch_max=instance.order.batch_max,
            block_tokens=instance.footprint.block_tokens,
            blocks_free=instance.pool.free,
        )
        return instance

    def _claim(self, more_bytes: int, instance_id: InstanceId) -> None:
        if more_bytes > self._free_bytes():
            raise OutOfMemory(
                f"instance {instance_id} wants {more_bytes} bytes more, "
                f"{self._free_bytes()} of {self._memory_bytes} are free"
            )

    def _free_bytes(self) -> float:
        return inf if self._memory_bytes is None else self._memory_bytes - self.held_bytes()


def kind_of(order: LoadOrder) -> tuple[ModelId, int]:
    """Instances of one kind have the same weights in the same graph."""
    return order.model.model_id, order.context_tokens_max
