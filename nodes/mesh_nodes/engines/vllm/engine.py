"""The vLLM engine: mesh's engine port for GPU nodes, and for CPUs where vLLM is built for them.

Owns the table of instances, each in an engine process of its own; here are the checks before a load
and what an instance's end means for the others: nothing. Loads run beside steps: what they share is
the table. Before: the node's agent. After: `remote`; `sleeping`, where instances may go and come.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from mesh.domain.errors import EngineError, MeshError, OutOfMemory
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import Footprint, ModelInfo
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.steps import (
    Decode,
    HeldModel,
    KvChunk,
    KvHeader,
    LoadTier,
    Prefill,
    PrefixChange,
    part_bytes,
)
from mesh.memory.cache_budget import CacheBudget
from mesh.runtime.engine import (
    Ended,
    EngineCapabilities,
    EngineRequest,
    InstanceMemory,
    LoadOrder,
    Progress,
    StepResult,
)
from mesh.runtime.measurable import no_counters
from mesh_loader.digests import Verifier, Verify, require_originals
from mesh_nodes.engines import host_memory
from mesh_nodes.engines.refusals import lacks_memory
from mesh_nodes.engines.vllm.cached import CachedBlocks
from mesh_nodes.engines.vllm.checks import check_format, check_order, covers_pages
from mesh_nodes.engines.vllm.footprint import estimate
from mesh_nodes.engines.vllm.host_pool import WeightsKey, open_pool
from mesh_nodes.engines.vllm.messages import Loaded, ProcessOptions, Range, Verb
from mesh_nodes.engines.vllm.releases import VllmRelease, installed_release
from mesh_nodes.engines.vllm.remote import LOAD_S_MAX, Remote
from mesh_nodes.engines.vllm.sleeping import SleepingProcesses, SleepSlot, WakeKey, wake_key
from mesh_nodes.engines.vllm.spare_processes import SpareProcesses
from mesh_nodes.engines.vllm.spawner import Spawner, start_spawner
from mesh_nodes.engines.vllm.watch import Watch

_CPU_BLOCK_TOKENS = 32
"""The least that vLLM's CPU kernels like."""
_GPU_BLOCK_TOKENS = 16
MAX_NUM_SEQS = 256
"""vLLM's own default of what it sets its buffers by when an engine starts."""

log = logging.getLogger(__name__)


class VllmEngine:
    """Implements `mesh.runtime.engine.Engine`; what each call does is said there."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        gpu_index: int | None = None,
        dtype: str | None = None,
        elastic: bool = True,
        release: VllmRelease | None = None,
        spawner: Spawner | None = None,
        available_bytes: Callable[[], int] = host_memory.available_bytes,
        asleep_max: int = 0,
        asleep_bytes_max: int = sys.maxsize,
        spare_max: int = 0,
        verify: Verify = Verify.FIRST,
    ) -> None:
        """`threads`, `gpu_index`: see `start_spawner`. `spawner`: one of the caller's own instead,
        which this engine does not close. `dtype`: f32 on CPUs, elsewhere the model's, unless given.
        `elastic`: KV memory comes with use and goes without a copy, where that can be had.
        `available_bytes` is asked before each load, which is refused when it is too little.
        `asleep_max`: unloaded instances that stay with their weights in the host's memory;
        `asleep_bytes_max`: of that, for these and for weights that a next load finds there.
        `spare_max`: processes that wait on the device for a load. `verify`: when a load checks the
        digests of its files.

        Raises Unavailable when vLLM is not installed or not of a release that is supported.
        """
        self._release = release or installed_release()
        on_cpu = self._on_cpu = self._release.computes_on_cpu
        self._dtype = dtype or ("float32" if on_cpu else "auto")
        self._elastic = elastic
        self._block_tokens = _CPU_BLOCK_TOKENS if on_cpu else _GPU_BLOCK_TOKENS
        self._available_bytes = available_bytes
        self._verifier = Verifier(verify)
        self._lock = threading.Lock()
        """Guards the tables alone, never a call."""
        self._instances: dict[InstanceId, Remote] = {}
        self._slots: dict[InstanceId, SleepSlot] = {}
        self._cached: dict[InstanceId, CachedBlocks] = {}
        self._budget = CacheBudget(lock=threading.RLock())
        self._bound_bytes = 0
        self._loading: dict[InstanceId, Remote | None] = {}
        self._pool = (
            open_pool(asleep_bytes_max, host_memory.available_bytes) if asleep_max else None
        )
        self._sleeping = SleepingProcesses(count_max=asleep_max, pool=self._pool)
        self._closed = False
        self._told: Ended = lambda instance_id, error: None
        self._watch = Watch(self._process_ended)
        self._owns_spawner = spawner is None
        self._spawner = spawner or start_spawner(threads, gpu_index)
        descriptor = None if self._pool is None else self._pool.descriptor
        self._spare = SpareProcesses(self._spawner, count_max=spare_max, pool=descriptor)

    def await_ready(self) -> None:
        """Wait until vLLM is imported, so that no load need. Raises EngineError when it fails."""
        self._spawner.await_ready()

    def fill_spare(self) -> None:
        """See that processes wait for loads, soon. Not before the node has looked what it takes of
        its device without any.
        """
        self._spare.fill()

    def resident_bytes(self) -> int:
        """What the spawner's processes take, including one that does not end although it was
        killed.
        """
        return host_memory.resident_bytes(self._spawner.pid, self._spawner.pids())

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="vllm",
            version=self._release.version,
            resize_kv=True,
            unloads_beside=True,
            swaps=self._sleeping.count_max > 0,
            swaps_parts=True,
            loads_on_device=True,
            caches_prefixes=True,
            as_published=True,
            embeds=True,
            batch_max=MAX_NUM_SEQS,
        )

    def watch(self, ended: Ended) -> None:
        self._told = ended

    def footprint(self, model: ModelInfo) -> Footprint:
        return estimate(
            model,
            dtype=self._dtype,
            block_tokens=self._block_tokens,
            on_cpu=self._release.computes_on_cpu,
        )

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        """vLLM reads the store's folder as it is. Raises UnsupportedModel where it cannot."""
        check_format(model)
        progress("nothing to prepare", 1.0)

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool:
        check_format(model)
        return True

    def tier_of(self, order: LoadOrder) -> LoadTier:
        key = wake_key(order, self._options(order.model))
        here = self._sleeping.has(key) or key.weights in self._pooled()
        return LoadTier.HOST if here else LoadTier.DISK

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        start_s = time.perf_counter()
        check_order(order)
        require_originals(order.model_path)
        self._verifier.check(order.model_path)
        with self._lock:
            if order.instance_id in self._instances or order.instance_id in self._loading:
                raise EngineError(f"instance {order.instance_id} is already loaded")
            self._loading[order.instance_id] = None
        footprint = self.footprint(order.model)
        self._budget.begin_load(order.instance_id, footprint.instance_bytes(order.kv_blocks))
        try:
            tier = self._bring_up(order, progress)
        finally:
            self._budget.end_load(order.instance_id)
            with self._lock:
                del self._loading[order.instance_id]
        self._spare.fill()
        if order.swapped:
            self._take_out(order.instance_id)
        progress("loaded", 1.0)
        return InstanceLoaded(
            instance_id=order.instance_id,
            footprint=footprint,
            kv_blocks=order.kv_blocks,
            elapsed_s=time.perf_counter() - start_s,
            tier=tier,
        )

    def unload(self, instance_id: InstanceId) -> None:
        with self._lock:
            remote = self._instances.pop(instance_id, None)
            slot = self._slots.pop(instance_id, None)
            cached = self._cached.pop(instance_id, None)
        if cached is not None:
            cached.remove()
        if remote is not None and (slot is None or not self._sleeping.sleep(slot)):
            remote.end()

    def asleep(self) -> tuple[HeldModel, ...]:
        """What a load would wake, the one asleep the longest first."""
        return self._sleeping.listed()

    def in_host_memory(self) -> tuple[HeldModel, ...]:
        """What sleeps, and what a load of any context would find in the pool of weights."""
        pooled = tuple(
            HeldModel(model_id=key.model.model_id, tier=LoadTier.HOST) for key in self._pooled()
        )
        return self._sleeping.listed() + pooled

    def swap(self, instance_id: InstanceId, share: float) -> None:
        self._instance(instance_id)
        if not self.capabilities.swaps:
            raise EngineError(f"instance {instance_id} stays: nothing sleeps here, nor is swapped")
        with self._lock:
            slot, cached = self._slots.get(instance_id), self._cached.get(instance_id)
        if slot is None or cached is None:
            raise EngineError(f"instance {instance_id} is being unloaded")
        footprint = self.footprint(slot.key.model)
        there_bytes = cached.weights_bytes - footprint.stays_bytes
        lacking_bytes = part_bytes(footprint.weights_bytes, share) - there_bytes
        if lacking_bytes > 0:
            self._check_room(instance_id, lacking_bytes)
            self._budget.begin_load(instance_id, lacking_bytes)
        try:
            self._sleeping.swap(slot, slot.moved(footprint.weights_bytes, share))
        finally:
            cached.note_weights()
            self._budget.end_load(instance_id)

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> int:
        """Submits the request, also to an instance whose process is gone. The next step reports
        that and ends the instance; a refusal would only send this request elsewhere and the next
        one here.
        """
        remote = self._instance(instance_id)
        self._cached[instance_id].note_use()
        self._cached[instance_id].make_room()
        try:
            return cast(int, remote.call(Verb.SUBMIT, request))
        except EngineError:
            if remote.alive:
                raise
        return 0

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        remote = self._instances.get(instance_id)
        if remote is not None and remote.alive:
            with suppress(EngineError):
                remote.call(Verb.ABORT, request_id)

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        remote = self._instance(instance_id)
        return cast(StepResult, remote.call(Verb.STEP, prefill, iterations, decode))

    def export_kv(
        self, instance_id: InstanceId, request_id: RequestId, first_block: int, blocks: int
    ) -> tuple[KvHeader, Iterator[KvChunk]]:
        raise EngineError(f"vLLM hands no KV blocks of request {request_id} over")

    def import_kv(
        self,
        instance_id: InstanceId,
        request: EngineRequest,
        header: KvHeader,
        chunks: Iterable[KvChunk],
    ) -> Generator[None, None, int]:
        raise EngineError(f"vLLM takes no KV blocks of request {request.request_id} over")

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        return cast(float, self._measured(instance_id, Verb.MEASURE, shape))

    def count_operators(
        self, instance_id: InstanceId, shape: IterationShape, cores: int | None = None
    ) -> CountedIteration:
        if cores is not None:
            raise no_counters("the vLLM engine with a part of the cores")
        return cast(CountedIteration, self._measured(instance_id, Verb.COUNT, shape))

    def _measured(self, instance_id: InstanceId, verb: Verb, shape: IterationShape) -> object:
        remote = self._instance(instance_id)
        self._cached[instance_id].make_room()
        return remote.call(verb, shape)

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        start_s = time.perf_counter()
        self._instance(instance_id)
        blocks = self._cached[instance_id].resize(kv_blocks)
        elapsed_s = time.perf_counter() - start_s
        return KvResized(instance_id=instance_id, kv_blocks=blocks, elapsed_s=elapsed_s)

    def bound_memory(self, memory_bytes: int) -> None:
        """Does not wait for iterations to end unless there is something new."""
        if memory_bytes != self._bound_bytes:
            self._bound_bytes = memory_bytes
            self._budget.bound(memory_bytes)

    def tell_prefixes(self) -> Mapping[InstanceId, PrefixChange]:
        with self._lock:
            remotes = [(i, remote) for i, remote in self._instances.items() if remote.alive]
        told = {}
        for instance_id, remote in remotes:
            with suppress(EngineError):
                told[instance_id] = cast(PrefixChange | None, remote.call(Verb.TELL))
        return {instance_id: change for instance_id, change in told.items() if change is not None}

    def kept_bytes(self) -> int:
        return 0

    def memory(self) -> tuple[InstanceMemory, ...]:
        with self._lock:
            remotes = sorted(self._instances.items())
        return tuple(books for _, remote in remotes if (books := remote.books) is not None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            remotes = [*self._instances.values(), *filter(None, self._loading.values())]
            self._instances.clear()
            self._slots.clear()
        self._watch.close()
        self._sleeping.close()
        self._spare.close()
        for remote in remotes:
            remote.end()
        if self._owns_spawner:
            self._spawner.close()
        if self._pool is not None:
            self._pool.close()

    def _take_out(self, instance_id: InstanceId) -> None:
        """One that is to come up without its weights. Unless it slept, its load has needed room for
        them: vLLM makes a model where it is to compute. Raises as `swap` does.
        """
        try:
            self.swap(instance_id, share=0.0)
        except MeshError:
            self.unload(instance_id)
            raise

    def _bring_up(self, order: LoadOrder, progress: Progress) -> LoadTier:
        key = wake_key(order, self._options(order.model))
        woken = self._sleeping.wake(order, key)
        slot, tier = (woken, LoadTier.HOST) if woken else self._start(order, key, progress)
        try:
            if tier is LoadTier.DISK:
                self._sleeping.reserve(slot)
            self._put(self._slots, order.instance_id, slot)
            cached = CachedBlocks(
                slot.remote,
                self._budget,
                self.footprint(order.model),
                order.kv_blocks,
                overflows=key.options.elastic and self._release.computes_on_cpu,
            )
            self._put(self._cached, order.instance_id, cached)
            self._put(self._instances, order.instance_id, slot.remote)
            if woken is None:
                self._watch.add(slot.remote)
            elif not slot.remote.alive:
                # The watch saw it when it was nobody's.
                self._process_ended(slot.remote)
        except BaseException:
            slot.remote.end()
            raise
        return tier

    def _start(
        self, order: LoadOrder, key: WakeKey, progress: Progress
    ) -> tuple[SleepSlot, LoadTier]:
        """A new process. What fails from the pool is read from disk; where that goes well, what
        stood in the pool was wrong and is never tried again, unless the process was killed amid it.
        """
        wanted_bytes = self.footprint(order.model).instance_bytes(order.kv_blocks)
        self._check_room(order.instance_id, wanted_bytes)
        progress("start an engine process", 0.0)
        remote = self._spare.take(order.instance_id)
        where = self._held(key, remote)
        if where is None:
            return self._load(remote, order, key, progress), LoadTier.DISK
        try:
            return self._load(remote, order, key, progress, where), LoadTier.HOST
        except OutOfMemory:
            raise
        except MeshError as error:
            log.warning("%s is not loaded from the pool: %s", order.instance_id, error.message)
        slot = self._load(self._spare.take(order.instance_id), order, key, progress)
        if not remote.killed:
            assert self._pool is not None
            self._pool.refuse(key.weights)
        return slot, LoadTier.DISK

    def _held(self, key: WakeKey, remote: Remote) -> Range | None:
        """What such a load finds in the pool: it may go at any time until this process holds it."""
        if self._pool is None or key.weights not in self._pooled():
            return None
        return self._pool.hold(key.weights, remote)

    def _load(
        self,
        remote: Remote,
        order: LoadOrder,
        key: WakeKey,
        progress: Progress,
        where: Range | None = None,
    ) -> SleepSlot:
        """`where`: from there, which the process holds; else from disk."""
        try:
            self._put(self._loading, order.instance_id, remote)
            answer = remote.call(
                Verb.LOAD,
                *(order, self.footprint(order.model), key.options, where),
                timeout_s=LOAD_S_MAX,
                progress=progress,
            )
            loaded = cast(Loaded, answer)
            if where is not None:
                assert self._pool is not None
                self._pool.hold(key.weights, remote, loaded.beside_bytes)
            return SleepSlot(key=key, loaded=loaded, remote=remote, pinned=where is not None)
        except BaseException:
            remote.end()
            raise

    def _pooled(self) -> tuple[WeightsKey, ...]:
        """What loads find in the pool. On GPUs nothing that is quantised: what their kernels make
        of a model of zeros, which such a load begins with, has not been seen yet.
        """
        if self._pool is None:
            return ()
        every = self._pool.listed()
        return every if self._on_cpu else tuple(k for k in every if not k.model.quantisation)

    def _options(self, model: ModelInfo) -> ProcessOptions:
        return ProcessOptions(
            dtype=self._dtype,
            block_tokens=self._block_tokens,
            elastic=self._elastic and self._can_be_elastic(model),
            movable=self._sleeping.count_max > 0,
        )

    def _can_be_elastic(self, model: ModelInfo) -> bool:
        """On GPUs chunks are shared by blocks, and by layers where they meet."""
        return not self._release.computes_on_cpu or covers_pages(model, self.footprint(model))

    def _process_ended(self, remote: Remote) -> None:
        """Tell of it, unless it was unloaded; a call may have found out, too."""
        if self._instances.get(remote.instance_id) is remote:
            self._told(remote.instance_id, remote.why_gone())

    def _put(
        self,
        table: MutableMapping[InstanceId, Any],
        instance_id: InstanceId,
        entry: Remote | SleepSlot | CachedBlocks,
    ) -> None:
        """Where `close` finds it. Raises EngineError when that has been called meanwhile."""
        with self._lock:
            if self._closed:
                raise EngineError(f"instance {instance_id} is not loaded: the engine is closed")
            table[instance_id] = entry

    def _instance(self, instance_id: InstanceId) -> Remote:
        """Raises EngineError when it was never loaded, or unloaded. One whose process is gone stays
        in the table until it is unloaded, though not in the books.
        """
        remote = self._instances.get(instance_id)
        if remote is None:
            raise EngineError(f"instance {instance_id} is not loaded")
        return remote

    def _check_room(self, instance_id: InstanceId, wanted_bytes: int) -> None:
        """Those that sleep go before a load is refused. Raises OutOfMemory."""
        while (available_bytes := self._available_bytes()) < wanted_bytes:
            if self._sleeping.evict():
                continue
            raise lacks_memory(instance_id, wanted_bytes, available_bytes)
