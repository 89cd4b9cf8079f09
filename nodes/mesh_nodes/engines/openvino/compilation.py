"""From a store folder to a compiled model: the CPU plugin, its properties, its failures.

Owns the OpenVINO core. A model whose shape has a blob is imported from it, any other is compiled.
`engine` asks it to prepare and to compile; `instance` runs what comes out. Every failure leaves as
one of mesh's errors.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import field
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import openvino as ov
import openvino.opset13 as ops

from mesh.domain.errors import EngineError, ModelError, OutOfMemory, TornModel
from mesh.domain.model import ComputePrecision, ModelFormat, ModelInfo, Task, WeightPrecision
from mesh.domain.values import dataclass, replace
from mesh.runtime.engine import LoadOrder, Progress
from mesh_loader.digests import WEIGHTS_SUFFIXES, Verifier, Verify, require_originals
from mesh_loader.prepared_key import openvino_key
from mesh_loader.sources import not_held_as
from mesh_nodes.engines.file_guard import FileGuard
from mesh_nodes.engines.openvino.architecture import Architecture, read_architecture
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.compiled_import import PLAIN_GRAPH, enable_import, import_compiled
from mesh_nodes.engines.openvino.four_bits import GROUP
from mesh_nodes.engines.openvino.graph import build_graph
from mesh_nodes.engines.openvino.ir import read_ir
from mesh_nodes.engines.openvino.mapped_file import MappedFile, Pages, pages_released
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions
from mesh_nodes.engines.openvino.prepared import (
    Layout,
    drop_prepared,
    prepared_path,
    read_layout,
    read_prepared,
)
from mesh_nodes.engines.openvino.preparing import PHASE, prepare_beside
from mesh_nodes.engines.openvino.rope import token_bytes
from mesh_nodes.engines.openvino.shape_blob import BoundBlob, cpu_fields, shape_key
from mesh_nodes.engines.openvino.weights import Array, graph_weights

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""None where the C library is not glibc."""


def return_memory() -> None:
    """1 to 4 ms in a process with a loaded model."""
    if _trim is not None:
        _trim(0)


_PROBE_SIZE = 64
ACTIVATION_GROUP = 64
"""Activations that share a scale, on CPUs with VNNI. Against OpenVINO's default of 32, decoding
takes 5 % and prefill 12 % less time; the divergence from f16 weights' tokens (KL, SmolLM2-135M) is
0.0071 nats instead of 0.0055, and would be 0.0126 with 192. Where fewer weights share a scale than
activations do, it takes three times as long.
"""

_Place = tuple[Path, int, WeightPrecision, ComputePrecision | None, Task | None]
"""A model's folder, the context limit, how its weights are held, what it asks to be computed in,
and what for."""

WaitForBlob = Callable[[str, Callable[[], None]], bool]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class CompiledGraph:
    """A compiled model and the memory that its constants refer to, for all instances of it."""

    model: ov.CompiledModel
    weights: Mapping[str, Array]
    maps: Sequence[Pages]
    blob_key: str | None = None
    """The key of the blob that the graph was imported from, or would have been if there were one.
    """
    imported: bool = False
    awaited: bool = False
    """It was imported from a blob that was not there yet when the load began."""
    guards: Sequence[FileGuard] = ()
    """The guards of the files that OpenVINO has mapped itself."""
    context_token_bytes: int = 0
    """What rope tables take for each token of the context limit."""
    import_again: Callable[[], "CompiledGraph | None"] | None = None
    """Imports another compiled model of the same weights, which shares nothing with this one, or
    returns `None` where there is no blob. It is `None` where there never is one.
    """
    _has_run: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """A block in which an instance runs for the first time. With the first of the model,
        OpenVINO repacks the weights that it was given as it meets them, and reads few of the former
        (the embedding's rows) again. All the same their pages would be there beside the repacked
        ones, twice the weights.

        Raises BlockingIOError at its end where what was read may not be what was checked.
        """
        # With further ones it would only take from the others what they read.
        with nullcontext() if self._has_run.is_set() else pages_released(self.maps):
            yield
        self._has_run.set()
        readers: list[Pages | FileGuard] = [*self.maps, *self.guards]
        for file in readers:
            file.settle()

    def release_read(self) -> None:
        """Give back what an iteration has read of the files: on a CPU without VNNI OpenVINO repacks
        all matrices once more in the first one of eight rows or so, and never reads them again.
        """
        for file in self.maps:
            file.release_pages()

    def release_activations(self) -> None:
        """Give back what iterations have left; the next one takes what it needs. Nothing goes back
        while another instance of the model has its first run, beside this one's iterations.
        """
        # OpenVINO refuses it then; no other failure is known, and nothing depends on it at once.
        with suppress(RuntimeError):
            self.model.release_memory()
        return_memory()


class Compiler:
    """Compiles models for one set of threads and precisions."""

    def __init__(
        self,
        *,
        threads: int,
        weights: WeightPrecision,
        precisions: Precisions = PLAIN,
        blobs: BlobFolder | None = None,
        verify: Verify = Verify.FIRST,
        wait_for_blob: WaitForBlob = lambda key, on_wait: False,
    ) -> None:
        """`weights`, `precisions`: of models that do not say how theirs are held and computed.
        Without `blobs` every model is compiled. `verify`: when files are checked before use.
        `wait_for_blob`, given the key of one that is not there, waits for it, if it is being made
        and worth that, and says whether to look again; it calls `on_wait` before.
        """
        self._core = ov.Core()
        self._blobs = blobs
        self._wait_for_blob = wait_for_blob
        self._verifier = Verifier(verify)
        self._weights = weights
        self._capable = capable(self._core)
        self.precisions = precisions.on(self._capable)
        """What comes of those that were asked for."""
        self._threads = threads
        self._platform = {
            **cpu_fields(),
            "openvino": ov.get_version(),
            "requirements": self._start_plugin(),
        }
        enable_import(self._core)
        self._in_use = WeakValueDictionary[_Place, CompiledGraph]()
        """It is the instances that keep them."""
        self._bringing_up = threading.Lock()
        """A load that was to share a model whose last instance went meanwhile waits for others."""

    def _start_plugin(self) -> str:
        """Compute something small, so that the plugin and its threads are there and what they take
        (25 MiB) is not taken for a part of the first model. Returns what it says of the device that
        it compiles for. Raises EngineError.
        """
        with engine_errors("OpenVINO's CPU plugin cannot be started"):
            rows = ops.parameter([-1, _PROBE_SIZE], np.float32)
            weights = ops.constant(np.zeros((_PROBE_SIZE, _PROBE_SIZE), np.float32))
            graph = ov.Model([ops.matmul(rows, weights, False, True)], [rows], "probe")
            properties = self._properties_of(self._weights)
            compiled = self._core.compile_model(graph, "CPU", properties)
            compiled.create_infer_request().infer({0: np.zeros((1, _PROBE_SIZE), np.float32)})
            return str(compiled.get_property("RUNTIME_REQUIREMENTS"))

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        """Write the quantised weights beside the model, in a process of its own, unless they are
        there.

        Raises TornModel, UnsupportedModel, ModelError or StorageError: what the graph cannot do is
        refused here, with the import, and not by the first load.
        """
        progress(PHASE, 0.0)
        if model.format is ModelFormat.SAFETENSORS:
            self._verifier.check(model_path, without=WEIGHTS_SUFFIXES)
            read_architecture(model_path)
        elif model.weights is not None:
            raise not_held_as(model_path.name, model.weights)
        if not self.is_prepared(model, model_path):
            self._check_originals(model_path)
            precision = self._precision(model)
            prepare_beside(model_path, openvino_key(precision), precision, progress)
        progress(PHASE, 1.0)

    def is_prepared(self, model: ModelInfo, model_path: Path) -> bool:
        """Whether `prepare` has nothing to write."""
        precision = self._precision(model)
        quantises = model.format is ModelFormat.SAFETENSORS and precision.quantised
        return not quantises or self.layout(model_path, precision) is not None

    def compile(
        self, model: ModelInfo, model_path: Path, context_tokens_max: int, progress: Progress
    ) -> CompiledGraph:
        """The model that another instance runs; where there is none, import it if its shape has a
        blob, or soon will; else read its weights, build its graph, and compile it, one model at a
        time.

        Raises TornModel, UnsupportedModel, OutOfMemory or EngineError.
        """
        progress("read weights", 0.0)
        start_s = time.perf_counter()
        place = self._place(model, model_path, context_tokens_max)
        graph = self._in_use.get(place)
        how = "shared with another instance"
        if graph is None:
            with self._bringing_up, engine_errors(f"model {model.model_id} cannot be compiled"):
                # Another load may just have brought it up: the weights are there once, whatever.
                graph = self._in_use.get(place)
                if graph is None:
                    graph = self._bring_up(model, model_path, context_tokens_max, progress)
                    how = "imported" if graph.imported else "compiled"
                    self._in_use[place] = graph
        elapsed_s = time.perf_counter() - start_s
        log.info("%s for a context of %d: %s, %.2f s", model.model_id, place[1], how, elapsed_s)
        return graph

    def counted(self, order: LoadOrder, cores: int | None = None) -> CompiledGraph:
        """Another compiled model of a loaded instance's, with counters, whose nodes are named by
        their roles; for so many cores, or all. It takes the weights once more. Raises OutOfMemory
        or EngineError.
        """
        model, path = order.model, order.model_path
        if model.format is ModelFormat.OPENVINO_IR or model.task is not None:
            what = (
                "an exported graph" if model.task is None else f"a model that serves {model.task}"
            )
            raise EngineError(
                f"{model.model_id} is {what}, of which no operators are counted",
                hint="profile it without --operators",
            )
        precision = self._precision(model)
        with engine_errors(f"model {model.model_id} cannot be compiled to be counted"):
            architecture = read_architecture(path)
            maps, weights = self._read_weights(architecture, path, precision)
            context_tokens_max = order.context_tokens_max
            graph = build_graph(architecture, weights, context_tokens_max, by_role=True)
            properties = self._properties_of(precision, model.precision) | {"PERF_COUNT": True}
            properties["INFERENCE_NUM_THREADS"] = cores or self._threads
            return CompiledGraph(self._compile(graph, properties), weights, maps)

    def shared(self, order: LoadOrder) -> CompiledGraph | None:
        """What a further instance of the order's model would share, if any."""
        return self._in_use.get(self.place(order))

    def share(self, order: LoadOrder, graph: CompiledGraph) -> None:
        """Further instances of the order's model share this one from now on."""
        self._in_use[self.place(order)] = graph

    def place(self, order: LoadOrder) -> _Place:
        return self._place(order.model, order.model_path, order.context_tokens_max)

    def _place(self, model: ModelInfo, model_path: Path, context_tokens_max: int) -> _Place:
        held = self._precision(model)
        return model_path, context_tokens_max, held, model.precision, model.task

    def _precision(self, model: ModelInfo) -> WeightPrecision:
        return model.weights or self._weights

    def _properties_of(
        self, weights: WeightPrecision, compute: ComputePrecision | None = None
    ) -> dict[str, object]:
        """`compute`: what the model asks for. What the CPU lacks is computed in f32."""
        precisions = self.precisions
        if compute is not None:
            precisions = Precisions(compute=compute, kv=precisions.kv).on(self._capable)
        return properties_of(precisions, self._threads, _activation_group(weights))

    def _bring_up(
        self, model: ModelInfo, model_path: Path, context_tokens_max: int, progress: Progress
    ) -> CompiledGraph:
        if model.format is ModelFormat.OPENVINO_IR:
            self._verifier.check(model_path)
            progress("compile", 0.2)
            guard = FileGuard(model_path / "openvino_model.bin")
            properties = self._properties_of(WeightPrecision.I8, model.precision)
            compiled = self._compile(read_ir(self._core, model_path), properties)
            return CompiledGraph(compiled, {}, (), guards=(guard,))
        precision, key = self._precision(model), None
        again: Callable[[], CompiledGraph | None] | None = None
        layout = self.layout(model_path, precision)
        properties = self._properties_of(precision, model.precision)
        if layout is None:
            self._check_originals(model_path)
        else:
            self._verifier.check(model_path, without=WEIGHTS_SUFFIXES)
            self.check_prepared(layout.path.parent)
        architecture = replace(read_architecture(model_path), task=model.task)
        tables = 1 if architecture.local_rope is None else 2
        rotary_size = architecture.rotary_size or architecture.head_size
        context_token_bytes = tables * token_bytes(rotary_size)
        if architecture.encoder is not None:
            context_token_bytes = 0
        # What the plugin makes of a mixture's experts, GatherMatmulCompressed, it exports, but
        # registers in no opset that its import reads; nor can Python build it, as it can paged
        # attention. Of what has a task no blob is made, either: the blob's maker knows text alone.
        plain = architecture.experts is None and model.task is None
        if layout is not None and plain:
            context = context_tokens_max
            key = self.blob_key(architecture, context, layout, precision, model.precision)
            again = partial(self._import, key, layout, properties)
            imported = self._import(key, layout, properties, progress)
            if imported is not None:
                return replace(
                    imported, context_token_bytes=context_token_bytes, import_again=again
                )
        progress("compile", 0.2)
        maps, weights = self._read_weights(architecture, model_path, precision)
        compiled = self.compile_graph(architecture, weights, context_tokens_max, properties)
        return CompiledGraph(
            compiled,
            weights,
            maps,
            blob_key=key,
            context_token_bytes=context_token_bytes,
            import_again=again,
        )

    def _check_originals(self, model_path: Path) -> None:
        """Raises TornModel for the first file that is damaged, or was removed to save space."""
        require_originals(model_path)
        self._verifier.check(model_path)

    def prepared_folder(self, model_path: Path, weights: WeightPrecision | None) -> Path:
        """Where the model's weights are, or would be, as loads map them."""
        return prepared_path(model_path, openvino_key(weights or self._weights))

    def check_prepared(self, folder: Path, between: Callable[[], None] = lambda: None) -> None:
        """Checks the prepared weights in a folder, with a call to `between` now and then. Raises
        TornModel. Prepared weights that are damaged go, if they can be derived anew: the next load
        does so.
        """
        model_path = folder.parent.parent
        try:
            self._verifier.check(folder, between=between)
        except TornModel as error:
            try:
                require_originals(model_path)
            except TornModel as gone:
                what = f"{error.message}; {gone.message}"
                raise TornModel(what, hint=gone.hint) from error
            drop_prepared(model_path, folder.name)
            raise TornModel(error.message, hint="load it again: it is derived anew") from error

    def export(
        self, architecture: Architecture, model_path: Path, context_tokens_max: int, folder: Path
    ) -> tuple[CompiledGraph, Path]:
        """Compile, with weights as of a model that does not say how they are held, and have
        OpenVINO write what it compiled into this empty folder: its cache does so without a second
        copy in memory, which `export_model` makes. Raises as `compile` does.
        """
        with engine_errors(f"{model_path.name} cannot be exported"):
            properties = self._properties_of(self._weights) | PLAIN_GRAPH
            properties["CACHE_DIR"] = str(folder)
            maps, weights = self._read_weights(architecture, model_path, self._weights)
            compiled = self.compile_graph(architecture, weights, context_tokens_max, properties)
        (path,) = folder.glob("*.blob")
        return CompiledGraph(compiled, weights, maps), path

    def import_bound(
        self, key: str, bound: BoundBlob, properties: Mapping[str, object] | None = None
    ) -> CompiledGraph:
        """`properties`: those that it was compiled with, unless it says nothing of its weights.
        Raises RuntimeError when OpenVINO refuses it.
        """
        tensor = ov.Tensor(bound.content, shared_memory=True)
        model = import_compiled(
            self._core, tensor, properties or self._properties_of(self._weights)
        )
        return CompiledGraph(model, {}, (bound,), blob_key=key, imported=True)

    def layout(self, model_path: Path, weights: WeightPrecision | None = None) -> Layout | None:
        """The layout of the model's prepared weights, or `None` where there are none: then there is
        no blob.
        """
        weights = weights or self._weights
        return read_layout(model_path, openvino_key(weights)) if weights.quantised else None

    def blob_key(
        self,
        architecture: Architecture,
        context_tokens_max: int,
        layout: Layout,
        weights: WeightPrecision | None = None,
        compute: ComputePrecision | None = None,
    ) -> str:
        return shape_key(
            architecture=architecture,
            context_tokens_max=context_tokens_max,
            layout=layout,
            properties=self._properties_of(weights or self._weights, compute),
            platform=self._platform,
        )

    def _import(
        self,
        key: str,
        layout: Layout,
        properties: Mapping[str, object],
        progress: Progress | None = None,
    ) -> CompiledGraph | None:
        """None where there is no blob, or OpenVINO refuses the one that there is. One that is being
        made is waited for if there is `progress` to tell.
        """
        if self._blobs is None:
            return None
        bound, awaited = self._blobs.bind(key, layout), False
        if bound is None and progress is not None:
            awaited = self._wait_for_blob(key, partial(progress, "wait for the compile", 0.1))
            bound = self._blobs.bind(key, layout) if awaited else None
        if bound is None:
            return None
        if progress is not None:
            progress("import compiled", 0.2)
        try:
            return replace(self.import_bound(key, bound, properties), awaited=awaited)
        except RuntimeError as error:
            self._blobs.drop(key, str(error).strip())
            return None

    def compile_graph(
        self,
        architecture: Architecture,
        weights: Mapping[str, Array],
        context_tokens_max: int,
        properties: Mapping[str, object] | None = None,
    ) -> ov.CompiledModel:
        """Compiles a graph from weights that are in memory. Raises RuntimeError as OpenVINO
        does.
        """
        graph = build_graph(architecture, weights, context_tokens_max)
        return self._compile(graph, properties or self._properties_of(self._weights))

    def _compile(self, graph: ov.Model, properties: Mapping[str, object]) -> ov.CompiledModel:
        return self._core.compile_model(graph, "CPU", properties)

    def _read_weights(
        self, architecture: Architecture, model_path: Path, precision: WeightPrecision
    ) -> tuple[list[MappedFile], Mapping[str, Array]]:
        """The prepared weights where there are any, else derived anew."""
        key = openvino_key(precision)
        prepared = read_prepared(model_path, key) if precision.quantised else None
        if prepared is not None:
            return [prepared[0]], prepared[1]
        checkpoint = Checkpoint(model_path)
        return checkpoint.maps, dict(graph_weights(architecture, checkpoint, precision))


def _activation_group(weights: WeightPrecision) -> int:
    fine = weights in (WeightPrecision.I4, WeightPrecision.FILE)
    return GROUP if fine else ACTIVATION_GROUP


def capable(core: ov.Core) -> frozenset[ComputePrecision]:
    """What the CPU multiplies in without first turning it into something else."""
    said = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    words = {"FP32": ComputePrecision.F32, "BF16": ComputePrecision.BF16}
    words["FP16"] = ComputePrecision.F16
    return frozenset({ComputePrecision.F32, *(words[word] for word in said if word in words)})


def properties_of(precisions: Precisions, threads: int, group: int) -> dict[str, object]:
    """As the plugin names them. `group`: activations that share a scale; 0: they are exact."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        # Every process pins its threads to the same first cores: two engines of one thread on two
        # cores ran at half speed. Alone, pinning gained nothing.
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": precisions.compute.value,
        "KV_CACHE_PRECISION": precisions.kv.value,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """OpenVINO's failures as EngineError, or OutOfMemory where that is why. `what` is the sentence
    that the reason follows."""
    try:
        yield
    except BlockingIOError as error:  # a FileGuard's
        raise ModelError(
            f"{what}: {error.filename}: {error.strerror}",
            hint="end what writes into the model store, and load it again",
        ) from error
    except MemoryError as error:
        raise OutOfMemory(f"{what}: out of memory", hint=_MEMORY_HINT) from error
    except RuntimeError as error:
        text = str(error).strip()
        if any(sign in text.lower() for sign in _MEMORY_SIGNS):
            raise OutOfMemory(f"{what}: out of memory", hint=_MEMORY_HINT) from error
        raise EngineError(f"{what}: {text.splitlines()[-1] if text else 'unknown'}") from error


_MEMORY_SIGNS = ("bad_alloc", "bad allocation", "cannot allocate", "out of memory")
_MEMORY_HINT = "unload another instance, or give the node more memory"
