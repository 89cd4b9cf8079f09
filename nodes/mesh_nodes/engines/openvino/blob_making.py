"""Makes the blob of one shape, in a process of its own that takes nothing from who serves.

Compiles a model, lets OpenVINO export it, takes the weights out, and keeps the blob if a model
imported from it computes the same logits as the compiled one, bit by bit. `blob_maker` starts it as
`python -m mesh_nodes.engines.openvino.blob_making JOB SCRATCH`, and clears the scratch folder.
What goes wrong is its last line on stderr, with exit code 1.
"""

import gc
import mmap
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import EngineError, MeshError
from mesh_loader.bounded_child import end_first
from mesh_nodes.engines.openvino.architecture import read_architecture
from mesh_nodes.engines.openvino.blob_folder import BlobFolder
from mesh_nodes.engines.openvino.blob_job import BlobJob
from mesh_nodes.engines.openvino.compilation import CompiledGraph, Compiler
from mesh_nodes.engines.openvino.exported import Bytes, without_weights
from mesh_nodes.engines.openvino.probe import probe_logits
from mesh_nodes.engines.openvino.shape_blob import BoundBlob


def make_blob(job: BlobJob, scratch: Path) -> None:
    """`scratch` is an empty folder beside the blobs. Raises EngineError when there can be no blob;
    other MeshErrors, OSError, RuntimeError or ValueError.
    """
    folder, model_path = BlobFolder(Path(job.folder)), Path(job.model_path)
    compiler = Compiler(threads=job.threads, weights=job.weights, precisions=job.precisions)
    architecture, layout = read_architecture(model_path), compiler.layout(model_path)
    if layout is None:
        raise EngineError(f"{model_path.name} has no prepared weights")
    key = compiler.blob_key(architecture, job.context_tokens_max, layout)
    if key != job.key:
        raise EngineError(f"the shape is {key} here and {job.key} at the node")

    def logits(graph: CompiledGraph) -> npt.NDArray[np.float32]:
        with graph.first_run():
            return probe_logits(
                graph,
                vocabulary_tokens=architecture.vocabulary_tokens,
                context_tokens_max=job.context_tokens_max,
            )

    exports = scratch / "exports"
    exports.mkdir()
    graph, exported = compiler.export(architecture, model_path, job.context_tokens_max, exports)
    blob = without_weights(_mapped(exported), _mapped(layout.path), layout.in_halves())
    expected = logits(graph)
    # One model in memory at a time.
    del graph
    gc.collect()
    written = scratch / key
    blob.write(written, key)
    found = logits(compiler.import_bound(key, BoundBlob(written, key, layout)))
    if not np.array_equal(found, expected):
        raise EngineError(
            "imported and compiled differ: logits by up to "
            f"{float(np.abs(found - expected).max()):.3g}"
        )
    folder.keep(key, written)


def main() -> int:
    end_first()
    try:
        make_blob(BlobJob.from_json(sys.argv[1]), Path(sys.argv[2]))
    except (MeshError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _mapped(path: Path) -> Bytes:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


if __name__ == "__main__":
    sys.exit(main())
