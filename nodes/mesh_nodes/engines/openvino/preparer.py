"""Has the weights of a model prepared in a process of its own (`preparing`), beside all else.

Neither its work nor its memory nor its crash is the node's. Before: the preparing lane, by
`compilation`. After: `prepared`, which maps what was written.
"""

import sys
from pathlib import Path

from mesh.domain.errors import MeshError, ModelError
from mesh.domain.model import WeightPrecision
from mesh.runtime.engine import Progress
from mesh_loader.bounded_child import run_bounded
from mesh_loader.protocol import parse_line
from mesh_nodes.engines.openvino.prepared import WRITING_S_MAX

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
