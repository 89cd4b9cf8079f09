"""Keeps a GGUF file's own 4-bit blocks beside the f16 weights, so that an engine can compute them.

Writes `model.ggml`, a safetensors container of bytes: a tensor `NAME:TYPE` for each matrix of one
of TYPES, [rows, bytes of a row], its blocks as llama.cpp defines them, its rows in Hugging Face's
order. After gguf_tensors, which has read the same bytes; before the engine that unpacks them.
"""

import os
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from mesh.runtime.engine import Progress
from mesh_loader.architectures import Shape
from mesh_loader.gguf_file import GgufFile
from mesh_loader.gguf_names import BLOCKS_FILE
from mesh_loader.gguf_tensors import Match, head_rows, raw_pieces, uninterleaved
from mesh_loader.safetensors_file import StoredTensor, header_bytes

TYPES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)


def four_bit(matches: list[Match]) -> list[Match]:
    """Those whose blocks are kept."""
    return [
        (want, tensor)
        for want, tensor in matches
        if tensor.type in TYPES and len(tensor.shape) == 2
    ]


def blocks_bytes(matches: list[Match]) -> int:
    """About how many bytes the file's blocks take."""
    return sum(tensor.size_bytes for _, tensor in four_bit(matches))


def write_blocks(
    file: GgufFile, shape: Shape, matches: list[Match], folder: Path, progress: Progress
) -> None:
    """Writes nothing where no tensor has 4 bits. Raises TornModel for a file that shrinks."""
    kept = four_bit(matches)
    if not kept:
        return
    entries = (
        (
            f"{want.name}:{tensor.type.name}",
            StoredTensor(dtype="U8", shape=(want.shape[0], tensor.size_bytes // want.shape[0])),
        )
        for want, tensor in kept
    )
    total_bytes, done_bytes = blocks_bytes(kept), 0
    with (
        file.path.open("rb", buffering=0) as source,
        (folder / BLOCKS_FILE).open("wb") as target,
    ):
        target.write(header_bytes(entries))
        for want, tensor in kept:
            rows = head_rows(shape, want)
            for count, data in raw_pieces(source.fileno(), file.path.name, tensor, rows):
                piece = np.frombuffer(data, np.uint8).reshape(count, -1)
                target.write((uninterleaved(piece, rows) if rows > 1 else piece).data)
                done_bytes += len(data)
                progress("keep 4-bit weights", done_bytes / total_bytes)
        target.flush()
        os.fsync(target.fileno())
