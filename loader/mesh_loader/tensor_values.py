"""What the numbers in safetensors files are: finite or not, and equal to another tensor's or not.

Reads files whose headers `safetensors_file.read_whole` has found sound, in pieces of bounded size.
`hf_import` asks before it takes a model over.
"""

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import TornModel
from mesh.domain.values import dataclass
from mesh.runtime.engine import Progress
from mesh_loader.safetensors_file import StoredTensor

PIECE_BYTES = 1 << 20
"""Read at once: so much stays in a core's cache until it has been looked through."""
_NOT_FINITE: Mapping[str, tuple[str, int]] = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E8M0": ("<u1", 0xFF),
}
"""By element type: the unsigned integer of its size, and the bits that are all set in a NaN and,
where the type has it, in an infinity, and in no finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A tensor and where its bytes lie in a file."""

    path: Path
    name: str
    tensor: StoredTensor
    begin_bytes: int
    end_bytes: int

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Its bytes. Raises TornModel for a file that has become shorter."""
        with self.path.open("rb") as file:
            file.seek(self.begin_bytes)
            left = self.end_bytes - self.begin_bytes
            while left:
                data = file.read(min(left, piece_bytes))
                if len(data) < min(left, piece_bytes):
                    raise TornModel(
                        f"{self.path.name} became shorter while it was read, in tensor {self.name}",
                        hint="import it again",
                    )
                left -= len(data)
                yield data


def located(path: Path, tensors: Mapping[str, StoredTensor]) -> list[Located]:
    """The file's tensors, in the order of their bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    found = []
    for name, tensor in tensors.items():
        begin, end = (8 + length + int(offset) for offset in header[name]["data_offsets"])
        found.append(Located(path=path, name=name, tensor=tensor, begin_bytes=begin, end_bytes=end))
    return sorted(found, key=lambda one: (one.begin_bytes, one.name))


def check_finite(tensors: Collection[Located], progress: Progress) -> None:
    """Looks through every tensor of a float type.

    Raises TornModel with the name of a tensor that holds a NaN or an infinity.
    """
    total_bytes = max(1, sum(one.end_bytes - one.begin_bytes for one in tensors))
    done_bytes = 0
    for one in tensors:
        if one.tensor.dtype in _NOT_FINITE:
            integer, bits = _NOT_FINITE[one.tensor.dtype]
            mask = np.dtype(integer).type(bits)
            for piece in one.pieces():
                if int((np.frombuffer(piece, integer) & mask).max()) == bits:
                    raise TornModel(
                        f"{one.path.name}: tensor {one.name} holds values that are not finite",
                        hint="fetch the file again; if it is as published, its weights are broken",
                    )
                done_bytes += len(piece)
                progress("check weights", done_bytes / total_bytes)
    progress("check weights", 1.0)


def equal(one: Located, other: Located) -> bool:
    """Whether two tensors of float types and of one shape hold the same numbers."""
    if one.tensor.dtype == other.tensor.dtype:
        return all(a == b for a, b in zip(one.pieces(), other.pieces(), strict=True))
    sizes = [np.dtype(_NOT_FINITE[each.tensor.dtype][0]).itemsize for each in (one, other)]
    pieces = [
        each.pieces(PIECE_BYTES // 8 * size) for each, size in zip((one, other), sizes, strict=True)
    ]
    return all(
        np.array_equal(_values(a, one.tensor.dtype), _values(b, other.tensor.dtype))
        for a, b in zip(*pieces, strict=True)
    )


def _values(piece: bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "BF16":
        upper = np.frombuffer(piece, "<u2").astype(np.uint32) << np.uint32(16)
        return upper.view(np.float32).astype(np.float64)
    floats = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
    return np.frombuffer(piece, floats).astype(np.float64)
