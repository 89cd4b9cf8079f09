"""The safetensors container: written front to back, and checked for being whole.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without gaps.
The writer puts the header first and then takes the tensors as they come, so a model of any size
passes through a bounded buffer. The reader looks at the header and the file's size alone.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.values import dataclass
from mesh_loader.config_keys import Listed, Object, Text, Whole, shown
from mesh_loader.model_files import opened

HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors library itself."""
_HEADER_ALIGNMENT_BYTES = 8
_ELEMENT_BITS = {
    "F4": 4, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16,
    "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64,
    "F64": 64,
}  # fmt: skip
DIMENSIONS_MAX = 8
_OFFSET = Whole(0, 2**63 - 1)
_ENTRY = Object(
    {
        "dtype": Text(),
        "shape": Listed(_OFFSET, DIMENSIONS_MAX),
        "data_offsets": Listed(_OFFSET, 2),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]


def header_bytes(tensors: Iterable[tuple[str, StoredTensor]]) -> bytes:
    """The head of a file that holds these tensors one after the other, ready to be written."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset_bytes = 0
    for name, tensor in tensors:
        end_bytes = offset_bytes + _size_bytes(tensor)
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def read_whole(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, after checking that the file is as long as its header says.

    Raises TornModel, with the file's name and the two sizes, for a cut-off or corrupt file, and
    UnsupportedModel for an element type outside the format's list.
    """
    with opened(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        data_start_bytes = 8 + length
        if not 2 <= length <= HEADER_BYTES_MAX or data_start_bytes > size_bytes:
            raise TornModel(
                f"{path.name} is truncated or no safetensors file: its header should end at byte "
                f"{data_start_bytes}, the file has {size_bytes}",
                hint="fetch the file again",
            )
        header = file.read(length)
    entries = _parsed(header, path.name)
    tensors, spans = {}, []
    for name, entry in entries.items():
        if name != "__metadata__":
            tensors[name], begin_bytes, tensor_end_bytes = _entry(name, entry, path.name)
            spans.append((begin_bytes, tensor_end_bytes, name))
    end_bytes = data_start_bytes
    for begin_bytes, tensor_end_bytes, name in sorted(spans):
        if data_start_bytes + begin_bytes != end_bytes:
            raise TornModel(
                f"{path.name} is corrupt: tensor {shown(name)} begins at byte {begin_bytes} of the "
                f"data, the one before it ends at byte {end_bytes - data_start_bytes}",
                hint="fetch the file again",
            )
        end_bytes = data_start_bytes + tensor_end_bytes
    if end_bytes != size_bytes:
        raise TornModel(
            f"{path.name} is torn: its tensors end at byte {end_bytes}, the file has {size_bytes}",
            hint="fetch the file again and compare its size with the original",
        )
    return tensors


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file and forces it to disk before the folder around it is published."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Likewise, a JSON object for people to read too; in ASCII, for a text of a model's may be none
    that UTF-8 can hold.
    """
    write_synced(path, json.dumps(value, indent=2).encode())


def sync_folder(folder: Path) -> None:
    """Forces a folder's entries to disk, so that a rename before or after it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * _ELEMENT_BITS[tensor.dtype] // 8


def _parsed(header: bytes, name: str) -> Mapping[str, Any]:
    try:
        entries = json.loads(header, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise TornModel(f"{name} is corrupt: its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise TornModel(f"{name} is corrupt: its header is no JSON object")
    return entries


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these. Raises ValueError where two have one name: readers would disagree."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _entry(name: str, entry: Any, file_name: str) -> tuple[StoredTensor, int, int]:
    """The tensor of one header entry, and where its bytes begin and end in the data."""
    named = Text().takes(name)
    if (
        not named
        or not _ENTRY.takes(entry)
        or not all(entry.get(key) is not None for key in _ENTRY.keys)
    ):
        raise TornModel(
            f"{file_name} is corrupt: the header entry of {shown(name)} is broken: {shown(entry)}",
            hint="fetch the file again",
        )
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in _ELEMENT_BITS:
        raise UnsupportedModel(
            f"{file_name}: tensor {shown(name)} has element type {shown(dtype)}",
            hint=f"mesh knows {', '.join(_ELEMENT_BITS)}",
        )
    tensor = StoredTensor(dtype=dtype, shape=shape)
    offsets = entry["data_offsets"]
    size_bytes = offsets[1] - offsets[0] if len(offsets) == 2 else -1
    if size_bytes != _size_bytes(tensor):
        raise TornModel(
            f"{file_name} is corrupt: tensor {shown(name)} should have {_size_bytes(tensor)} "
            f"bytes, its entry says {size_bytes}",
            hint="fetch the file again",
        )
    return tensor, offsets[0], offsets[1]
