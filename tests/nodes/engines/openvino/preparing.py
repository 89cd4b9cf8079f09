"""Prepares weights in the test's own process: where they matter, and who has made them does not.

The process that a node has for it takes longer to begin than a tiny model's weights take.
"""

from pathlib import Path

from mesh.domain.model import WeightPrecision
from mesh_loader.prepared_key import openvino_key
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.prepared import write_prepared
from mesh_nodes.engines.openvino.weights import graph_weights


def prepare_here(model_path: Path, weights: WeightPrecision) -> None:
    """What `Compiler.prepare` leaves beside the model; nothing for weights that are as they are."""
    if weights.quantised:
        drawn = graph_weights(read_architecture(model_path), Checkpoint(model_path), weights)
        write_prepared(model_path, openvino_key(weights), drawn)
