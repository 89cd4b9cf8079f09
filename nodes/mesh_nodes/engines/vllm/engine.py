"""The vLLM engine: mesh's engine port for GPU nodes, and for CPUs where vLLM is built for them.

Owns the table of instances, each in an engine process of its own; here are the checks before a load
and what an instance's end means for the others: nothing. Loads run beside steps: what they share is
the table. Before: the node's agent. After: `remote`.
"""

import os
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil

from mesh.domain.errors import EngineError, OutOfMemory, UnsupportedModel
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.model import Footprint, ModelFormat, ModelInfo
from mesh.domain.profile import IterationShape
from mesh.domain.units import format_bytes
from mesh.runtime.engine import (
    Ended,
    EngineCapabilities,
    EngineRequest,
    InstanceMemory,
    LoadedInstance,
    LoadOrder,
    Progress,
    ResizedKv,
    StepResult,
)
from mesh_nodes.engines.page_range import PAGE_BYTES
from mesh_nodes.engines.vllm.environment import ENVIRONMENT
from mesh_nodes.engines.vllm.footprint import estimate
from mesh_nodes.engines.vllm.messages import ProcessOptions, Verb
from mesh_nodes.engines.vllm.releases import VllmRelease, installed_release
from mesh_nodes.engines.vllm.remote import LOAD_S_MAX, Remote
from mesh_nodes.engines.vllm.spawner import Spawner
from mesh_nodes.engines.vllm.watch import Watch

_CPU_BLOCK_TOKENS = 32
"""The least that vLLM's CPU kernels like."""
_GPU_BLOCK_TOKENS = 16


def _available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def start_spawner(threads: int | None = None, gpu_index: int | None = None) -> Spawner:
    """What starts engine processes that compute on so many cores, all usable ones unless given; and
    on that GPU, in the order of the PCI bus.
    """
    threads = threads or len(os.sched_getaffinity(0))
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    if gpu_index is not None:
        environment |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": str(gpu_index),
        }
    return Spawner(environment)


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
        available_bytes: Callable[[], int] = _available_bytes,
    ) -> None:
        """`threads`, `gpu_index`: see `start_spawner`. `spawner`: one of the caller's own instead,
        which this engine does not close. `dtype`: f32 on CPUs, elsewhere the model's, unless given.
        `elastic`: KV memory comes with use and goes without a copy, where that can be had.
        `available_bytes` is asked before each load, which is refused when it is too little.

        Raises Unavailable when vLLM is not installed or not of a release that is supported.
        """
        self._release = release or installed_release()
        on_cpu = self._release.computes_on_cpu
        self._dtype = dtype or ("float32" if on_cpu else "auto")
        self._elastic = on_cpu and elastic
        self._block_tokens = _CPU_BLOCK_TOKENS if on_cpu else _GPU_BLOCK_TOKENS
        self._available_bytes = available_bytes
        self._lock = threading.Lock()
        """Guards the tables alone, never a call."""
        self._instances: dict[InstanceId, Remote] = {}
        self._loading: dict[InstanceId, Remote | None] = {}
        self._closed = False
        self._told: Ended = lambda instance_id, error: None
        self._watch = Watch(self._process_ended)
        self._owns_spawner = spawner is None
        self._spawner = spawner or start_spawner(threads, gpu_index)

    def await_ready(self) -> None:
        """Wait until vLLM is imported, so that no load need. Raises EngineError when it fails."""
        self._spawner.await_ready()

    def resident_bytes(self) -> int:
        """Of the processes that this engine has started. Pages that an engine process shares with
        the nursery count once, and those that it has copied of them meanwhile, not at all.
        """
        with self._lock:
            pids = [remote.pid for remote in self._instances.values()]
        nursery_bytes = rss_bytes(self._spawner.pid)
        return nursery_bytes + sum(max(rss_bytes(pid) - nursery_bytes, 0) for pid in pids)

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            name="vllm",
            version=self._release.version,
            resize_kv=True,
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
        _check_format(model)
        progress("nothing to prepare", 1.0)

    def load(self, order: LoadOrder, progress: Progress) -> LoadedInstance:
        start_s = time.perf_counter()
        self._check(order)
        with self._lock:
            if order.instance_id in self._instances or order.instance_id in self._loading:
                raise EngineError(f"instance {order.instance_id} is already loaded")
            self._loading[order.instance_id] = None
        try:
            self._bring_up(order, progress)
        finally:
            with self._lock:
                del self._loading[order.instance_id]
        progress("loaded", 1.0)
        return LoadedInstance(
            footprint=self.footprint(order.model),
            kv_blocks=order.kv_blocks,
            elapsed_s=time.perf_counter() - start_s,
        )

    def unload(self, instance_id: InstanceId) -> None:
        with self._lock:
            remote = self._instances.pop(instance_id, None)
        if remote is not None:
            remote.end()

    def submit(self, instance_id: InstanceId, request: EngineRequest) -> None:
        """Taken, too, by an instance whose process is gone: the next step says so, which ends the
        instance, where a refusal would only send the request elsewhere and the next one here.
        """
        remote = self._instance(instance_id)
        try:
            remote.call(Verb.SUBMIT, request)
        except EngineError:
            if remote.alive:
                raise

    def abort(self, instance_id: InstanceId, request_id: RequestId) -> None:
        remote = self._instances.get(instance_id)
        if remote is not None and remote.alive:
            with suppress(EngineError):
                remote.call(Verb.ABORT, request_id)

    def step(
        self, instance_id: InstanceId, prefill_tokens_max: int, iterations: int = 1
    ) -> StepResult:
        remote = self._instance(instance_id)
        return cast(StepResult, remote.call(Verb.STEP, prefill_tokens_max, iterations))

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        return cast(float, self._instance(instance_id).call(Verb.MEASURE, shape))

    def resize_kv(self, instance_id: InstanceId, kv_blocks: int) -> ResizedKv:
        start_s = time.perf_counter()
        blocks = cast(int, self._instance(instance_id).call(Verb.RESIZE, kv_blocks))
        return ResizedKv(kv_blocks=blocks, elapsed_s=time.perf_counter() - start_s)

    def memory(self) -> tuple[InstanceMemory, ...]:
        with self._lock:
            remotes = sorted(self._instances.items())
        return tuple(books for _, remote in remotes if (books := remote.books) is not None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            remotes = [*self._instances.values(), *filter(None, self._loading.values())]
            self._instances.clear()
        self._watch.close()
        for remote in remotes:
            remote.end()
        if self._owns_spawner:
            self._spawner.close()

    def _bring_up(self, order: LoadOrder, progress: Progress) -> None:
        progress("start an engine process", 0.0)
        remote = Remote(order.instance_id, self._spawner)
        footprint = self.footprint(order.model)
        options = ProcessOptions(
            dtype=self._dtype,
            block_tokens=self._block_tokens,
            elastic=self._elastic and _covers_pages(order.model, footprint),
        )
        try:
            self._put(self._loading, order.instance_id, remote)
            remote.call(
                Verb.LOAD, order, footprint, options, timeout_s=LOAD_S_MAX, progress=progress
            )
            self._put(self._instances, order.instance_id, remote)
            self._watch.add(remote)
        except BaseException:
            remote.end()
            raise

    def _process_ended(self, remote: Remote) -> None:
        """Tell of it, unless it was unloaded; a call may have found out, too."""
        if self._instances.get(remote.instance_id) is remote:
            self._told(remote.instance_id, remote.why_gone())

    def _put(
        self, table: MutableMapping[InstanceId, Any], instance_id: InstanceId, remote: Remote
    ) -> None:
        """Where `close` finds it. Raises EngineError when that has been called meanwhile."""
        with self._lock:
            if self._closed:
                raise EngineError(f"instance {instance_id} is not loaded: the engine is closed")
            table[instance_id] = remote

    def _instance(self, instance_id: InstanceId) -> Remote:
        """Raises EngineError when it was never loaded, or unloaded. One whose process is gone stays
        in the table until it is unloaded, though not in the books.
        """
        remote = self._instances.get(instance_id)
        if remote is None:
            raise EngineError(f"instance {instance_id} is not loaded")
        return remote

    def _check(self, order: LoadOrder) -> None:
        _check_format(order.model)
        if min(order.kv_blocks, order.batch_max, order.context_tokens_max) < 1:
            raise EngineError(
                f"instance {order.instance_id} asks for {order.kv_blocks} KV blocks, "
                f"{order.batch_max} requests and {order.context_tokens_max} tokens of context",
                hint="each must be at least 1",
            )
        if not (order.model_path / "config.json").is_file():
            raise EngineError(f"{order.model_path} holds no model: there is no config.json in it")
        wanted_bytes = self.footprint(order.model).instance_bytes(order.kv_blocks)
        available_bytes = self._available_bytes()
        if wanted_bytes > available_bytes:
            raise OutOfMemory(
                f"instance {order.instance_id} takes {format_bytes(wanted_bytes)}, "
                f"{format_bytes(available_bytes)} are available",
                hint="unload another instance, or ask for fewer KV blocks",
            )


def rss_bytes(pid: int | None) -> int:
    """0 for a process that is not there."""
    try:
        return 0 if pid is None else int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _check_format(model: ModelInfo) -> None:
    if model.format is not ModelFormat.SAFETENSORS:
        raise UnsupportedModel(
            f"{model.source} is stored as {model.format}, which only the OpenVINO engine loads",
            hint="deploy it from safetensors or GGUF, or on CPU nodes",
        )


def _covers_pages(model: ModelInfo, footprint: Footprint) -> bool:
    """Whether a block fills whole pages in each layer, so that it can be given back by itself."""
    return footprint.kv_block_bytes % (model.layers * PAGE_BYTES) == 0
