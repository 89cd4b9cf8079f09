"""The OpenVINO engine: mesh's engine port for CPU nodes.

Owns the loaded instances. `compilation` brings a model up, `instance` runs it; here are the books,
the checks before a load, and the release after one. Loads run beside steps: what they share is the
table of instances, and the budget of what stays cached.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import openvino as ov

from mesh.domain.errors import EngineError
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import InstanceLoaded, KvResized
from mesh.domain.model import ComputePrecision, Footprint, KvPrecision, ModelInfo, WeightPrecision
from mesh.domain.profile import CountedIteration, IterationShape
from mesh.domain.steps import (
    Decode,
    HeldModel,
    KvChunk,
    KvHeader,
    LoadTier,
    Prefill,
    PrefixChange,
    repeated,
)
from mesh.domain.values import replace
from mesh.memory.cache_budget import CacheBudget
from mesh.memory.kept_caches import KeptCaches
from mesh.memory.shared_weights import counted_once
from mesh.runtime.engine import (
    Ended,
    EngineCapabilities,
    EngineRequest,
    InstanceMemory,
    LoadOrder,
    Progress,
    StepResult,
)
from mesh_loader.digests import Verify
from mesh_nodes.engines import host_memory
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.blob_index import BlobIndex
from mesh_nodes.engines.openvino.blob_maker import BlobJob, BlobMaker
from mesh_nodes.engines.openvino.compilation import (
    CompiledGraph,
    Compiler,
    engine_errors,
    return_memory,
)
from mesh_nodes.engines.openvino.counting import OperatorCounters
from mesh_nodes.engines.openvino.footprint import BATCH_MAX
from mesh_nodes.engines.openvino.instance import Instance, KeptKv
from mesh_nodes.engines.openvino.kv_cache import KvResize
from mesh_nodes.engines.openvino.least_load import least_load_s
from mesh_nodes.engines.openvino.measured_footprints import MeasuredFootprints
from mesh_nodes.engines.openvino.own_graphs import OwnGraphs
from mesh_nodes.engines.openvino.page_keeper import PageKeeper
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions
from mesh_nodes.engines.refusals import check_bounds, lacks_memory
from mesh_nodes.hardware import probe

BUSY_LOAD_FACTOR = 1.5
"""How much longer an import takes while up to 19 instances decode on two cores than alone, in the
mean. It is used until a load of this node has shown its own factor.
"""
PAGES_S_MAX = 1.0
"""A load waits so long for the pages of cached blocks that have gone for it."""
PAGES_PAUSE_S = 0.01
REST_S = 0.05
"""Without an iteration, until the engine is not about to compute the next one."""


def release() -> str:
    """OpenVINO's, which decides how long iterations take as much as the processor does."""
    return str(ov.get_version()).split("-")[0]


def _footprints_of(
    weights: WeightPrecision, precisions: Precisions, folder: Path | None
) -> MeasuredFootprints:
    beside = "" if precisions.compute is ComputePrecision.F32 else f"-{precisions.compute}"
    name = f"openvino-{release()}-{weights}-{precisions.kv}{beside}.json"
    return MeasuredFootprints(
        weights=weights,
        kv=precisions.kv,
        compute=precisions.compute,
        repacks=not probe().has_vnni,
        path=folder and folder / name,
    )


class OpenVinoEngine:
    """Implements `mesh.runtime.engine.Engine`; what each call does is said there."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        weights: WeightPrecision = WeightPrecision.I8,
        precision: ComputePrecision = PLAIN.compute,
        kv: KvPrecision = PLAIN.kv,
        kv_resize: KvResize = KvResize.ELASTIC,
        available_bytes: Callable[[], int] = host_memory.available_bytes,
        blobs_path: Path | None = None,
        verify: Verify = Verify.FIRST,
        footprints_path: Path | None = None,
        page_cache_bytes: int = 0,
    ) -> None:
        """`threads`: cores to compute on, those that the process may use unless given.
        `weights`, `precision`: how those are held, and what is computed in, of models that do not
        say it.
        `kv_resize`: how KV caches grow and shrink; tokens do not depend on it.
        `available_bytes` is asked before each load, which is refused when it is too little.
        `blobs_path`: the folder of what lets a shape's second load do without a compile; without
        one every load compiles.
        `verify`: when a load checks the digests of its files.
        `footprints_path`: the folder of what instances were seen to take; without one the engine
        learns it anew.
        `page_cache_bytes`: of the host's memory, for what loads would read; 0: it is left to the
        kernel.
        """
        self._weights = weights
        self._kv_resize = kv_resize
        self._available_bytes = available_bytes
        self._threads = threads or len(os.sched_getaffinity(0))
        self._blobs_path = blobs_path
        blobs = BlobFolder(blobs_path) if blobs_path is not None else None
        self._blob_maker = BlobMaker(available_bytes)
        self._compiler = Compiler(
            threads=self._threads,
            weights=weights,
            precisions=Precisions(compute=precision, kv=kv),
            blobs=blobs,
            verify=verify,
            wait_for_blob=self._blob_maker.wait_for,
        )
        self._precisions = self._compiler.precisions
        self._footprints = _footprints_of(weights, self._precisions, footprints_path)
        self._blob_index = BlobIndex(self._compiler, blobs) if blobs is not None else None
        return_memory()
        self._instances: dict[InstanceId, Instance] = {}
        self._lock = threading.Lock()
        """Guards the table and the counts of loads, never an instance."""
        self._budget = CacheBudget(lock=threading.RLock())
        self._kept = KeptCaches[KeptKv](lock=threading.Lock())
        self._own_graphs = OwnGraphs(
            self._compiler,
            self._budget,
            available_bytes=available_bytes,
            instances=self._loaded,
        )
        self._counters = OperatorCounters(
            self._compiler, self._budget, available_bytes=available_bytes
        )
        self._loads_begun = self._loads_ended = 0
        self._computing, self._worked_s = False, 0.0
        self._prepared: dict[InstanceId, Path] = {}
        """Where the weights of instances were mapped from."""
        self._pages = PageKeeper(
            page_cache_bytes,
            check=self._compiler.check_prepared,
            rests=self.rests,
            loaded=lambda: tuple(self._prepared.values()),
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="openvino",
            version=release(),
            variant="" if self._precisions == PLAIN else str(self._precisions),
            resize_kv=True,
            computes_ahead=True,
            kv_format=f"openvino/{self._weights}/{self._precisions}",
            caches_prefixes=True,
            swaps=True,
            shares_weights=True,
            embeds=True,
            busy_load_factor=BUSY_LOAD_FACTOR,
            loads_in_process=True,
            batch_max=BATCH_MAX,
        )

    def prepared(self, folders: Sequence[Path]) -> tuple[HeldModel, ...]:
        """Those of the stored models in these folders that a load would not have to compile."""
        if self._blob_index is None:
            return ()
        held = self._blob_index.held(folders, self._blob_maker.awaited(), self._pages.kept)
        self._pages.offer(self._blob_index.prepared)
        return held

    def least_load_s(self) -> float:
        """Seconds of a load whatever its bytes, measured in half of one. Raises EngineError."""
        with self._computes(), engine_errors("a graph cannot be compiled"):
            return least_load_s(self._compiler)

    def watch(self, ended: Ended) -> None:
        """Instances end with the agent, and never before it."""

    def footprint(self, model: ModelInfo) -> Footprint:
        return self._footprints.footprint(model)

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        self._compiler.prepare(model, model_path, progress)

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool:
        return self._compiler.is_prepared(model, model_path)

    def tier_of(self, order: LoadOrder) -> LoadTier:
        return LoadTier.HOST if self._shares(order) else LoadTier.DISK

    def load(self, order: LoadOrder, progress: Progress) -> InstanceLoaded:
        start_s = time.perf_counter()
        if order.instance_id in self._instances:
            raise EngineError(f"instance {order.instance_id} is already loaded")
        check_bounds(order)
        shares = self._shares(order)
        cached = self._pages.has(self._prepared_folder(order))
        instance, graph = self._bring_up(order, progress, kept=self._kept.take(order))
        with self._lock:
            self._instances[order.instance_id] = instance
            if instance.resident:
                self._prepared[order.instance_id] = self._prepared_folder(order)
        progress("loaded", 1.0)
        # What waited for its blob says nothing of loads that find one.
        found = graph is not None and graph.imported and not graph.awaited
        prepared_tier = LoadTier.CACHED if cached else LoadTier.PREPARED
        compiled_tier = prepared_tier if found else LoadTier.DISK
        elapsed_s = time.perf_counter() - start_s
        if graph is not None:
            self._wish_for_blob(order, graph, elapsed_s)
        return InstanceLoaded(
            instance_id=order.instance_id,
            footprint=instance.footprint,
            kv_blocks=instance.memory().kv_blocks,
            elapsed_s=elapsed_s,
            tier=LoadTier.HOST if shares else compiled_tier,
            prefixes=instance.found,
        )

    def unload(self, instance_id: InstanceId) -> None:
        with self._lock:
            instance = self._instances.pop(instance_id, None)
            self._prepared.pop(instance_id, None)
            others = list(self._instances.values())
        if instance is None:
            return
        self._own_graphs.forget(instance)
        self._counters.drop()
        kept = instance.leave_blocks()
        if kept is not None:
            self._kept.put(instance.order, kept)
        return_memory()
        model, reached, tables_bytes = instance.model, instance.reached, instance.tables_bytes
        known = instance.resident and not any(map(instance.shares_with, others))
        before_bytes, moment = self._beside_kv_bytes(), self._moment()
        del instance
        return_memory()
        freed_bytes = before_bytes - self._beside_kv_bytes()
        quiet = self._loads_begun == self._loads_ended and not self._own_graphs.making
        if known and quiet and moment == self._moment():
            self._footprints.note(model, freed_bytes - tables_bytes, reached)

    def swap(self, instance_id: InstanceId, share: float) -> None:
        instance, resident = self._instance(instance_id), share >= 1.0
        if resident and not instance.resident:
            start_s = time.perf_counter()
            order = replace(instance.order, kv_blocks=0, swapped=False)
            _, graph = self._bring_up(order, lambda *_: None, instance)
            assert graph is not None
            self._wish_for_blob(order, graph, time.perf_counter() - start_s)
            with self._lock:
                if self._instances.get(instance_id) is instance:
                    self._prepared[instance_id] = self._prepared_folder(order)
        elif instance.resident and not resident:
            self._own_graphs.forget(instance)
            self._counters.drop()
            with self._moves_memory():
                instance.leave()
                return_memory()
            with self._lock:
                self._prepared.pop(instance_id, None)

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> int:
        return self._instance(instance_id).submit(request)

    def export_kv(
        self, instance_id: InstanceId, request_id: RequestId, first_block: int, blocks: int
    ) -> tuple[KvHeader, Iterator[KvChunk]]:
        return self._instance(instance_id).export_kv(request_id, first_block, blocks)

    def import_kv(
        self,
        instance_id: InstanceId,
        request: EngineRequest,
        header: KvHeader,
        chunks: Iterable[KvChunk],
    ) -> Generator[None, None, int]:
        return self._instance(instance_id).import_kv(request, header, chunks)

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.abort(request_id)

    def step(
        self, instance_id: InstanceId, prefill: Prefill, iterations: int = 1, decode: Decode = None
    ) -> StepResult:
        instance = self._instance(instance_id)
        with self._computes():
            result = repeated(instance.step, prefill, iterations, decode)
        self._own_graphs.note(instance, result)
        return replace(result, prefixes=instance.tell_prefixes())

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        with self._computes():
            return self._instance(instance_id).measure(shape)

    def count_operators(
        self, instance_id: InstanceId, shape: IterationShape, cores: int | None = None
    ) -> CountedIteration:
        with self._computes():
            return self._counters.count(self._instance(instance_id), shape, cores)

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> KvResized:
        start_s = time.perf_counter()
        blocks = self._instance(instance_id).resize_kv(kv_blocks)
        self._own_graphs.give_back()
        elapsed_s = time.perf_counter() - start_s
        return KvResized(instance_id=instance_id, kv_blocks=blocks, elapsed_s=elapsed_s)

    def tell_prefixes(self) -> Mapping[InstanceId, PrefixChange]:
        told = ((instance.instance_id, instance.tell_prefixes()) for instance in self._loaded())
        changed = {instance_id: change for instance_id, change in told if change is not None}
        return {**changed, **self._kept.tell()}

    def bound_memory(self, memory_bytes: int) -> None:
        self._budget.bound(memory_bytes)
        self._counters.drop_unused()
        self._own_graphs.give_back_beside()
        if self.rests():
            self._own_graphs.make_at_rest()

    def kept_bytes(self) -> int:
        return self._kept.held_bytes

    def memory(self) -> tuple[InstanceMemory, ...]:
        """The memory of each instance. Weights that several instances share are counted with the
        first of them, and a compiled model that is being made for one alone, or that counts, with
        that one.
        """
        instances = self._loaded()
        held = [instance.memory() for instance in instances]
        sizes = [(m.weights_bytes, i.shared_weights) for m, i in zip(held, instances, strict=True)]
        counted = zip(held, counted_once(sizes), strict=True)
        making = {**self._own_graphs.making, **self._counters.taken}
        return tuple(
            replace(memory, weights_bytes=size + making.get(memory.instance_id, 0))
            for memory, size in counted
        )

    def blobs_made(self, timeout_s: float) -> bool:
        """Wait until no blob is being made; whether that is so within `timeout_s`."""
        return self._blob_maker.wait(timeout_s)

    def rests(self) -> bool:
        """Whether nothing is loaded or computed, nor was a moment ago."""
        loads = self._loads_begun != self._loads_ended
        return not (loads or self._computing) and time.perf_counter() - self._worked_s >= REST_S

    def close(self) -> None:
        self._pages.close()
        self._counters.drop()
        self._own_graphs.close()
        self._blob_maker.close()
        for instance_id in list(self._instances):
            self.unload(instance_id)
        self._kept.close()

    @contextmanager
    def _computes(self) -> Iterator[None]:
        self._computing = True
        try:
            yield
        finally:
            self._computing, self._worked_s = False, time.perf_counter()

    def _beside_kv_bytes(self) -> int:
        held_bytes = sum(books.kv_held_bytes for books in self.memory())
        return host_memory.own_resident_bytes() - held_bytes - self.kept_bytes()

    def _moment(self) -> tuple[int, ...]:
        """Differs when something else moved memory in the meantime."""
        held = [books.kv_held_bytes for books in self.memory()]
        return (self._loads_begun, self.kept_bytes(), *held)

    @contextmanager
    def _moves_memory(self) -> Iterator[None]:
        """A block beside which no unload can say what it has freed."""
        with self._lock:
            self._loads_begun += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads_ended += 1
            self._worked_s = time.perf_counter()

    def _taken_bytes(self, order: LoadOrder) -> int:
        """By the instance, beside what it shares with those that are there."""
        footprint = self._footprint(order)
        if order.swapped:
            return order.kv_blocks * footprint.kv_block_bytes
        spared_bytes = footprint.shared_bytes if self._shares(order) else 0
        return footprint.instance_bytes(order.kv_blocks) - spared_bytes

    def _footprint(self, order: LoadOrder) -> Footprint:
        return self.footprint(order.model).at_context(order.context_tokens_max)

    def _shares(self, order: LoadOrder) -> bool:
        """Whether it would run what an instance that is there runs."""
        return self._compiler.shared(order) is not None

    def _prepared_folder(self, order: LoadOrder) -> Path:
        return self._compiler.prepared_folder(order.model_path, order.model.weights)

    def _bring_up(
        self,
        order: LoadOrder,
        progress: Progress,
        instance: Instance | None = None,
        kept: KeptKv | None = None,
    ) -> tuple[Instance, CompiledGraph | None]:
        """The model in memory unless it is to be swapped in later, and a new instance that computes
        with it, or this one. `kept`: what an earlier one has left to a new one; its blocks are
        those in force already.
        """
        wanted_bytes = self._taken_bytes(order)
        kept_bytes = 0 if kept is None else order.kv_blocks * kept.pool.block_bytes
        with self._moves_memory():
            try:
                gone_bytes = self._budget.begin_load(order.instance_id, wanted_bytes - kept_bytes)
                self._own_graphs.give_back()
                self._counters.drop()
                # Of what it takes over, its blocks hold so much already.
                held_bytes = 0 if kept is None else min(kept.held_bytes, kept_bytes)
                self._await_memory(order.instance_id, wanted_bytes - held_bytes, gone_bytes)
                if not (order.swapped or self._shares(order)):
                    self._pages.use(self._prepared_folder(order))
                return self._compile(order, progress, instance, kept)
            except BaseException as error:
                if kept is not None:
                    kept.close()
                _drop_frames(error)
                return_memory()
                raise
            finally:
                self._budget.end_load(order.instance_id)

    def _await_memory(self, instance_id: InstanceId, wanted_bytes: int, gone_bytes: int) -> None:
        """Cached blocks of so many bytes have gone for a load, and their pages are being given
        back, which is waited for. Raises OutOfMemory.
        """
        give_up_s = time.monotonic() + (PAGES_S_MAX if gone_bytes else 0.0)
        while wanted_bytes > (available_bytes := self._available_bytes()):
            if time.monotonic() >= give_up_s:
                raise lacks_memory(instance_id, wanted_bytes, available_bytes)
            time.sleep(PAGES_PAUSE_S)

    def _compile(
        self, order: LoadOrder, progress: Progress, instance: Instance | None, kept: KeptKv | None
    ) -> tuple[Instance, CompiledGraph | None]:
        graph = None
        if not order.swapped:
            graph = self._compiler.compile(
                order.model, order.model_path, order.context_tokens_max, progress
            )
            progress("warm up", 0.9)
        with engine_errors(f"instance {order.instance_id} cannot be brought up"):
            if instance is not None and graph is not None:
                instance.enter(graph)
                return instance, graph
            made = Instance(
                order,
                graph,
                footprint=self.footprint(order.model),
                budget=self._budget,
                kv_resize=self._kv_resize,
                kept=kept,
            )
        return made, graph

    def _wish_for_blob(self, order: LoadOrder, graph: CompiledGraph, compile_s: float) -> None:
        """The one that would have spared the load, of so many seconds, its compile."""
        if graph.imported or graph.blob_key is None or self._blobs_path is None:
            return
        job = BlobJob(
            key=graph.blob_key,
            folder=str(self._blobs_path),
            model_path=str(order.model_path),
            context_tokens_max=order.context_tokens_max,
            threads=self._threads,
            weights=order.model.weights or self._weights,
            precisions=Precisions(
                compute=order.model.precision or self._precisions.compute,
                kv=self._precisions.kv,
            ),
        )
        self._blob_maker.ask(job, self._footprint(order).weights_bytes, compile_s)

    def _loaded(self) -> list[Instance]:
        """All instances, by their ids."""
        with self._lock:
            return [instance for _, instance in sorted(self._instances.items())]

    def _instance(self, instance_id: InstanceId) -> Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            raise EngineError(f"instance {instance_id} is not loaded")
        return instance


def _drop_frames(error: BaseException | None) -> None:
    """Clear what the failed calls' frames refer to: a half-built instance must not live as long as
    somebody keeps the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
