"""Prepares the weights of one model in a process of its own, on all cores but below all who serve.

`prepare_beside` starts it as `python -m mesh_nodes.engines.openvino.preparing MODEL_PATH KEY
PRECISION`: neither its work nor its memory nor its crash is the node's. It writes the lines of
`mesh_loader.protocol`, and ends with 0, or with 1 after an error line. Before: the preparing lane,
by `compilation`. After: `prepared`, which maps what was written.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from mesh.domain.errors import MeshError, ModelError
from mesh.domain.model import WeightPrecision
from mesh.runtime.engine import Progress
from mesh_loader.bounded_child import end_first, run_bounded
from mesh_loader.protocol import Reporter, error_line, parse_line, write_line
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.checkpoint import Checkpoint
from mesh_nodes.engines.openvino.prepared import WRITING_S_MAX, write_prepared
from mesh_nodes.engines.openvino.weights import Array, graph_weights, weight_plan

PHASE = "quantise weights"
_CHILD = "mesh_nodes.engines.openvino.preparing"


def prepare_beside(
    model_path: Path, key: str, precision: WeightPrecision, progress: Progress
) -> None:
    """Blocks until it is done. Raises TornModel, UnsupportedModel or StorageError as the child
    does, ModelError when that dies, and whatever `progress` raises, which stops it.
    """
    share, error = 0.0, None

    def on_line(line: bytes) -> None:
        nonlocal share, error
        try:
            said = parse_line(line)
        except ValueError:
            return  # a library's own print
        if isinstance(said, MeshError):
            error = said
        elif isinstance(said, tuple):
            share = said[1]

    ended = run_bounded(
        [sys.executable, "-m", _CHILD, str(model_path), key, precision.value],
        timeout_s=WRITING_S_MAX,
        environment={},
        on_wait=lambda: progress(PHASE, share),
        on_line=on_line,
    )
    if error is not None:
        raise error
    if ended.exit_code != 0:
        lines = ended.output.strip().splitlines()
        reason = f"exit code {ended.exit_code}" if ended.exit_code is not None else "too late"
        raise ModelError(
            f"{model_path.name} was not prepared: its process ended ({reason})"
            + (f": {lines[-1]}" if lines else ""),
            hint="the system kills what takes too much memory: see its log",
        )


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
