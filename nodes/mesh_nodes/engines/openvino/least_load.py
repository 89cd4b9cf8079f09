"""What a load takes on this machine whatever its bytes: a graph without any to speak of, compiled.

Most of a small model's load is OpenVINO's passes over the graph, so much a layer, whatever the
sizes: 25 to 40 ms on two cores. Before: `engine`, asked by the node where no load has been seen.
After: what the node states.
"""

import time
from collections.abc import Mapping

import numpy as np

from mesh_nodes.engines.openvino.architecture import Architecture, Rope
from mesh_nodes.engines.openvino.compilation import Compiler
from mesh_nodes.engines.openvino.weights import Array, Matrix, weight_plan

LAYERS = 30
"""Models of this size class have about so many layers: 22 to 36."""
COMPILED_LAYERS = 8
CONTEXT_TOKENS = 256


def least_load_s(compiler: Compiler) -> float:
    """How long a load of LAYERS layers takes without weights, scaled from a graph of fewer layers.
    Raises EngineError.
    """
    # The first one of a process takes a tenth of a second longer.
    _compile_s(compiler, 1)
    return _compile_s(compiler, COMPILED_LAYERS) * LAYERS / COMPILED_LAYERS


def _compile_s(compiler: Compiler, layers: int) -> float:
    architecture = _architecture(layers)
    weights = _weights(architecture)
    start_s = time.perf_counter()
    compiler.compile_graph(architecture, weights, CONTEXT_TOKENS)
    return time.perf_counter() - start_s


def _architecture(layers: int) -> Architecture:
    return Architecture(
        kind="llama",
        layers=layers,
        hidden_size=64,
        intermediate_size=128,
        attention_heads=4,
        kv_heads=2,
        head_size=16,
        vocabulary_tokens=64,
        norm_epsilon=1e-5,
        rope=Rope(theta=10000.0),
        tied_embeddings=True,
    )


def _weights(architecture: Architecture) -> Mapping[str, Array]:
    """As `graph_weights` names them, quantised."""
    weights: dict[str, Array] = {}
    for weight in weight_plan(architecture):
        if isinstance(weight, Matrix):
            rows = sum(count for _, count in weight.sources)
            weights[weight.name] = np.zeros((rows, weight.columns), np.int8)
            weights[f"{weight.name}.scale"] = np.ones((rows, 1), np.float32)
        else:
            weights[weight.name] = np.ones(weight.size, np.float32)
    return weights
