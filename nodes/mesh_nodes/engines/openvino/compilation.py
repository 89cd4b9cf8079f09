"""From a store folder to a compiled model: the CPU plugin, its properties, its failures.

Owns the OpenVINO core. `engine` asks it to prepare and to compile; `instance` runs what comes out.
Every failure leaves as one of mesh's errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as ops

from mesh.domain.errors import EngineError, OutOfMemory
from mesh.domain.model import ModelFormat, ModelInfo
from mesh.runtime.engine import Progress
from mesh_nodes.engines.openvino.architecture import Architecture, read_architecture
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.graph import build_graph
from mesh_nodes.engines.openvino.ir import read_ir
from mesh_nodes.engines.openvino.mapped_file import MappedFile, pages_released
from mesh_nodes.engines.openvino.prepared import read_prepared, write_prepared
from mesh_nodes.engines.openvino.weights import (
    Array,
    WeightPrecision,
    graph_weights,
    weight_arrays,
)

_PROBE_SIZE = 64
_PREPARED_VERSION = 1
"""Raised whenever the prepared arrays change their names or meaning."""


class KvPrecision(StrEnum):
    """Elements of the KV cache. u8 halves it and changes tokens; f16 keeps them."""

    F32 = "f32"
    F16 = "f16"
    U8 = "u8"


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A compiled model and the memory that its constants refer to."""

    model: ov.CompiledModel
    weights: Mapping[str, Array]
    maps: Sequence[MappedFile]

    def first_run(self) -> AbstractContextManager[None]:
        """A block in which the model runs for the first time: OpenVINO repacks the weights that it
        was given as it meets them, and reads few of the former (the embedding's rows) again. All
        the same their pages would be there beside the repacked ones, twice the weights.
        """
        return pages_released(self.maps)


class Compiler:
    """Compiles models for one set of threads and precisions."""

    def __init__(self, *, threads: int, weights: WeightPrecision, kv: KvPrecision) -> None:
        self._core = ov.Core()
        self._precision = weights
        self._key = f"openvino-{weights.value}-v{_PREPARED_VERSION}"
        self._properties = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            # bf16, the default where the CPU has it, is no faster than f32 with i8 weights (their
            # activations are quantised on the fly), and with f16 weights it changes tokens.
            "INFERENCE_PRECISION_HINT": "f32",
            # Activations share a scale by 64, on CPUs with VNNI. Against OpenVINO's default of 32,
            # decoding takes 5 % and prefill 12 % less time; the divergence from f16 weights' tokens
            # (KL, SmolLM2-135M) is 0.0071 instead of 0.0055 nats, and would be 0.0126 with 192.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 64,
            "KV_CACHE_PRECISION": kv.value,
            # Every process pins its threads to the same first cores: two engines of one thread on
            # two cores ran at half speed. Alone, pinning gained nothing.
            "ENABLE_CPU_PINNING": False,
        }
        self._start_plugin()

    def _start_plugin(self) -> None:
        """Compute something small, so that the plugin and its threads are there and what they take
        (25 MiB) is not taken for a part of the first model. Raises EngineError.
        """
        with engine_errors("OpenVINO's CPU plugin cannot be started"):
            rows = ops.parameter([-1, _PROBE_SIZE], np.float32)
            weights = ops.constant(np.zeros((_PROBE_SIZE, _PROBE_SIZE), np.float32))
            graph = ov.Model([ops.matmul(rows, weights, False, True)], [rows], "probe")
            compiled = self._core.compile_model(graph, "CPU", self._properties)
            compiled.create_infer_request().infer({0: np.zeros((1, _PROBE_SIZE), np.float32)})

    def prepare(self, model: ModelInfo, model_path: Path, progress: Progress) -> None:
        """Write the quantised weights beside the model, unless they are there.

        Raises TornModel, UnsupportedModel or StorageError.
        """
        progress("quantise weights", 0.0)
        quantises = model.format is ModelFormat.SAFETENSORS and self._precision.quantised
        if quantises and read_prepared(model_path, self._key) is None:
            architecture = read_architecture(model_path)
            total = weight_arrays(architecture, self._precision)
            weights = graph_weights(architecture, Checkpoint(model_path), self._precision)
            write_prepared(model_path, self._key, _reported(weights, total, progress))
        progress("quantise weights", 1.0)

    def compile(
        self, model: ModelInfo, model_path: Path, context_tokens_max: int, progress: Progress
    ) -> CompiledGraph:
        """Read the weights, build the graph, compile it.

        Raises TornModel, UnsupportedModel, OutOfMemory or EngineError.
        """
        progress("read weights", 0.0)
        with engine_errors(f"model {model.model_id} cannot be compiled"):
            if model.format is ModelFormat.OPENVINO_IR:
                graph = read_ir(self._core, model_path)
                progress("compile", 0.2)
                return CompiledGraph(
                    self._core.compile_model(graph, "CPU", self._properties), {}, ()
                )
            architecture = read_architecture(model_path)
            maps, weights = self._weights(architecture, model_path)
            progress("compile", 0.2)
            graph = self.compile_graph(architecture, weights, context_tokens_max)
            return CompiledGraph(graph, weights, maps)

    def compile_graph(
        self, architecture: Architecture, weights: Mapping[str, Array], context_tokens_max: int
    ) -> ov.CompiledModel:
        """The same of weights that are there. Raises RuntimeError as OpenVINO does."""
        graph = build_graph(architecture, weights, context_tokens_max)
        return self._core.compile_model(graph, "CPU", self._properties)

    def _weights(
        self, architecture: Architecture, model_path: Path
    ) -> tuple[list[MappedFile], Mapping[str, Array]]:
        """The prepared weights where there are any, else derived anew."""
        prepared = read_prepared(model_path, self._key) if self._precision.quantised else None
        if prepared is not None:
            return [prepared[0]], prepared[1]
        checkpoint = Checkpoint(model_path)
        return checkpoint.maps, dict(graph_weights(architecture, checkpoint, self._precision))


def _reported(
    weights: Iterator[tuple[str, Array]], total: int, progress: Progress
) -> Iterator[tuple[str, Array]]:
    for done, item in enumerate(weights):
        progress("quantise weights", done / total)
        yield item


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """OpenVINO's failures as EngineError, or OutOfMemory where that is why. `what` is the sentence
    that the reason follows."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"{what}: out of memory", hint=_MEMORY_HINT) from error
    except RuntimeError as error:
        text = str(error).strip()
        if any(sign in text.lower() for sign in _MEMORY_SIGNS):
            raise OutOfMemory(f"{what}: out of memory", hint=_MEMORY_HINT) from error
        raise EngineError(f"{what}: {text.splitlines()[-1] if text else 'unknown'}") from error


_MEMORY_SIGNS = ("bad_alloc", "bad allocation", "cannot allocate", "out of memory")
_MEMORY_HINT = "unload another instance, or give the node more memory"
