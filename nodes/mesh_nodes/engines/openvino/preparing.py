"""Prepares the weights of one model, on all cores but below all who serve.

`preparer` starts it as `python -m mesh_nodes.engines.openvino.preparing MODEL_PATH KEY PRECISION`.
It writes the lines of `mesh_loader.protocol`, and ends with 0, or with 1 after an error line.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mesh.domain.errors import MeshError
from mesh.domain.model import WeightPrecision
from mesh_loader.bounded_child import end_first
from mesh_loader.protocol import Reporter, error_line, write_line
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.prepared import write_prepared
from mesh_nodes.engines.openvino.preparer import PHASE
from mesh_nodes.engines.openvino.weights import Array, graph_weights, weight_plan

NICE = 10
"""As an import's: a load may wait for it, a token may not."""


def main() -> int:
    os.nice(NICE)
    end_first()
    path, key, precision = Path(sys.argv[1]), sys.argv[2], WeightPrecision(sys.argv[3])
    try:
        write_prepared(path, key, _weights(path, precision))
    except MeshError as error:
        write_line(error_line(error))
        return 1
    return 0


def _weights(model_path: Path, precision: WeightPrecision) -> Iterator[tuple[str, Array]]:
    architecture = read_architecture(model_path)
    reporter, done = Reporter(), 0
    planned = {weight.name for weight in weight_plan(architecture)}
    threads = len(os.sched_getaffinity(0))
    weights = graph_weights(architecture, Checkpoint(model_path), precision, threads)
    for name, array in weights:
        reporter.report(PHASE, done / len(planned))
        done += name in planned
        yield name, array


if __name__ == "__main__":
    sys.exit(main())
