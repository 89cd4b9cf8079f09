"""Turns the tensors of a GGUF file into a safetensors file of f16 weights under Hugging Face names.

Tensors pass through in pieces of whole rows, so memory stays bounded however large the model is.
llama.cpp stores the query and key projections of llama models with the two rotary halves of each
head interleaved; that order is undone here. Before it come gguf_file and gguf_config, after it the
folder is published by the store.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.runtime.engine import Progress
from mesh_loader.architectures import ExpectedTensor, Shape
from mesh_loader.gguf_file import GgufFile, GgufTensor
from mesh_loader.safetensors_file import StoredTensor, header_bytes

PIECE_ELEMENTS = 1 << 18
"""Elements dequantised at once: 1 MiB of f32, which stays in a core's cache."""

HalfArray = npt.NDArray[np.float16]
_Element = TypeVar("_Element", bound=np.generic)


Match = tuple[ExpectedTensor, GgufTensor]


def matched(file: GgufFile, expected: list[ExpectedTensor]) -> list[Match]:
    """Each expected tensor with the file's tensor for it, in the same order.

    Raises TornModel for a missing or misshapen tensor and UnsupportedModel for one that mesh would
    have to leave out (the model would compute something else) or cannot dequantise.
    """
    found: list[Match] = []
    for want in expected:
        tensor = file.tensors.get(want.gguf_name)
        if tensor is None:
            raise TornModel(
                f"{file.path.name} lacks tensor {want.gguf_name} (it has {len(file.tensors)})",
                hint="a part of a split model must be merged first: llama-gguf-split --merge",
            )
        if tensor.shape != want.shape:
            raise TornModel(
                f"{file.path.name}: tensor {tensor.name} has shape {tensor.shape}, "
                f"its metadata calls for {want.shape}"
            )
        found.append((want, tensor))
    # rope_freqs carries Llama 3's rotary scaling, which gguf_config puts into config.json.
    architecture = file.text("general.architecture")
    known = {want.gguf_name for want in expected} | {"rope_freqs.weight"}
    for name in file.tensors:
        if name not in known:
            raise UnsupportedModel(
                f"{file.path.name}: tensor {name} has no place in a plain {architecture} model"
            )
    for kind in sorted({tensor.type for _, tensor in found}):
        _check_dequantisable(file, kind)
    return found


def write_weights(
    file: GgufFile, shape: Shape, matches: list[Match], path: Path, progress: Progress
) -> None:
    """Writes model.safetensors: the header, then every tensor in f16, and syncs it to disk.

    Raises TornModel for weights that are not finite numbers, or a file that shrinks meanwhile.
    """
    total_elements = sum(want.elements for want, _ in matches)
    done_elements = 0
    with file.path.open("rb", buffering=0) as source, path.open("wb") as target:
        target.write(
            header_bytes((w.name, StoredTensor(dtype="F16", shape=w.shape)) for w, _ in matches)
        )
        for want, tensor in matches:
            together = head_rows(shape, want)
            offset = want.gguf_offset
            for piece in _pieces(source.fileno(), file.path.name, tensor, together, offset):
                target.write((uninterleaved(piece, together) if together > 1 else piece).data)
                done_elements += piece.size
                progress("convert weights", done_elements / total_elements)
        target.flush()
        os.fsync(target.fileno())


def read_small(file: GgufFile, name: str) -> npt.NDArray[np.float32]:
    """One small tensor, whole, as f32."""
    tensor = file.tensors[name]
    with file.path.open("rb", buffering=0) as source:
        data = _read_exactly(
            source.fileno(), tensor.size_bytes, tensor.offset_bytes, file.path.name
        )
    return _dequantized(data, tensor.type)


def head_rows(shape: Shape, want: ExpectedTensor) -> int:
    """How many of the tensor's rows make a head whose order llama.cpp has changed; 1 where it has
    not.
    """
    interleaved = shape.architecture == "llama" and want.rotary_heads > 0
    return shape.head_size if interleaved else 1


def raw_pieces(
    descriptor: int, file_name: str, tensor: GgufTensor, rows_multiple: int
) -> Iterator[tuple[int, bytes]]:
    """The tensor's rows, a multiple of the given at once: how many, and their bytes.

    Raises TornModel for a file that shrinks meanwhile.
    """
    row_elements = tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor.type]
    row_bytes = row_elements // block_elements * block_bytes
    step_rows = max(1, PIECE_ELEMENTS // (row_elements * rows_multiple)) * rows_multiple
    if len(tensor.shape) == 1:
        # A vector is one row for the container, but a bias is permuted by its elements.
        rows, row_bytes = row_elements, block_bytes
        step_rows = rows
    for start_row in range(0, rows, step_rows):
        count = min(step_rows, rows - start_row)
        offset_bytes = tensor.offset_bytes + start_row * row_bytes
        yield count, _read_exactly(descriptor, count * row_bytes, offset_bytes, file_name)


def _pieces(
    descriptor: int, file_name: str, tensor: GgufTensor, rows_multiple: int, offset: float
) -> Iterator[HalfArray]:
    """The tensor less its offset in f16, in pieces [rows, row elements] whose rows are a multiple
    of the given."""
    for count, data in raw_pieces(descriptor, file_name, tensor, rows_multiple):
        with np.errstate(over="ignore", invalid="ignore"):
            piece = (_dequantized(data, tensor.type) - np.float32(offset)).astype(np.float16)
        if not np.isfinite(piece).all():
            raise TornModel(
                f"{file_name}: tensor {tensor.name} holds values that are not finite in f16",
                hint="the file is corrupt, or its weights exceed 65504 and need another format",
            )
        yield piece.reshape(count, -1)


def _dequantized(data: bytes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    # As one long row: the library would otherwise go through its rows in groups of 16.
    blocks = np.frombuffer(data, np.uint8).reshape(1, -1)
    values: npt.NDArray[np.float32] = dequantize(blocks, kind).reshape(-1)
    return values


def uninterleaved(piece: npt.NDArray[_Element], head_rows: int) -> npt.NDArray[_Element]:
    """Rows of whole heads, from llama.cpp's order (pairs) to Hugging Face's (halves)."""
    columns = piece.shape[1]
    pairs = piece.reshape(-1, head_rows // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, columns)


def _read_exactly(descriptor: int, count_bytes: int, offset_bytes: int, name: str) -> bytes:
    data = os.pread(descriptor, count_bytes, offset_bytes)
    if len(data) != count_bytes:
        raise TornModel(f"{name} became shorter while it was read, at byte {offset_bytes}")
    return data


def _check_dequantisable(file: GgufFile, kind: GGMLQuantizationType) -> None:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        _dequantized(bytes(block_bytes), kind)
    except NotImplementedError:
        raise UnsupportedModel(
            f"{file.path.name}: tensors of type {kind.name} cannot be dequantised",
            hint="use a file quantised as Q4_K_M, Q5_K_M, Q6_K, Q8_0 or F16",
        ) from None
