"""Reads the header of a GGUF file: its metadata and where each tensor lies.

Every count, length and offset is checked against the size of the file before it is believed, so a
truncated or corrupt file is named as such and never read past its end. Tensor data is not touched
here; gguf_tensors reads it afterwards, piece by piece. The layout is that of the GGUF specification
(ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

import math
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from mesh.domain.errors import StorageError, TornModel, UnsupportedModel
from mesh.domain.values import dataclass
from mesh_loader.config_keys import (
    INT32_MAX,
    NUMBER_MAX,
    Either,
    Flag,
    Kind,
    Listed,
    Real,
    Text,
    Whole,
    shown,
)
from mesh_loader.gguf_names import MAGIC
from mesh_loader.model_files import opened

VERSIONS = (2, 3)
METADATA_ENTRIES_MAX = 65_536
TENSORS_MAX = 65_536
TENSOR_DIMENSIONS_MAX = 4
ARRAY_NESTING_MAX = 2
ARRAY_ITEMS_MAX = 1 << 23
"""The most items of all arrays of a file together; a vocabulary of 262,144 has some 1.3 million."""
HEADER_BYTES_MAX = 256 << 20
"""The largest in use take some 30 MB. A sparse file may claim any."""
TEXT_BYTES_MAX = 4 << 20
"""The longest text, such as a chat template or a license."""
TOKEN_CHARS_MAX = 4096
DEFAULT_ALIGNMENT_BYTES = 32

SCALARS: dict[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}

_COUNT, _NUMBER = Whole(0, INT32_MAX), Real(-NUMBER_MAX)
_FLAG = Either(Flag(), Whole(0, 1))
"""Some writers have truth values as numbers."""
_ALIGNMENT = Whole(1, 1 << 20)
_TEXT = Text(TEXT_BYTES_MAX)
_TEXTS = Listed(Text(TOKEN_CHARS_MAX), ARRAY_ITEMS_MAX)
_NUMBERS = Listed(_NUMBER, ARRAY_ITEMS_MAX)

MetadataValue: TypeAlias = "int | float | bool | str | list[MetadataValue]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor of a GGUF file. `shape` is row-major (outermost first), in elements."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset_bytes: int
    """From the start of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The header of one GGUF file."""

    path: Path
    metadata: dict[str, MetadataValue]
    tensors: dict[str, GgufTensor]

    def integer(self, key: str, default: int | None = None) -> int:
        """A count or an id of the metadata. Raises TornModel where it is missing without a default,
        and for whatever is none.
        """
        return int(self._value(key, _COUNT, default))

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of the metadata, likewise."""
        return float(self._value(key, _NUMBER, default))

    def text(self, key: str, default: str | None = None) -> str:
        """A text of the metadata, likewise."""
        return str(self._value(key, _TEXT, default))

    def flag(self, key: str, default: bool) -> bool:
        """A truth value of the metadata, likewise."""
        return bool(self._value(key, _FLAG, default))

    def texts(self, key: str) -> list[str]:
        """A list of tokens or of merges, empty where there is none."""
        return list(self._value(key, _TEXTS, []))

    def numbers(self, key: str) -> list[float]:
        """A list of numbers, empty where there is none."""
        return [float(item) for item in self._value(key, _NUMBERS, [])]

    def _value(self, key: str, kind: Kind, default: object) -> Any:
        value = self.metadata.get(key, default)
        if not kind.takes(value):
            what = "it is missing" if value is None else f"it is {shown(value)}"
            raise corrupt(self.path.name, f"metadata {key} should be {kind}, {what}")
        return value


def read_header(path: Path) -> GgufFile:
    """The header of a GGUF file, after checking that all its tensors lie inside the file.

    Raises TornModel for a file that is no GGUF file or is cut off, UnsupportedModel for a version
    or tensor type that mesh does not read, StorageError where the file cannot be read at all.
    """
    try:
        with opened(path) as file:
            return _read(_Cursor(file, path.name, os.fstat(file.fileno()).st_size), path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


class _Cursor:
    """Reads forward through a file whose size is known; a read past the end is a torn file."""

    def __init__(self, file: BinaryIO, name: str, size_bytes: int) -> None:
        self._file = file
        self.name = name
        self.size_bytes = size_bytes
        self.offset_bytes = 0
        self.items = 0
        """The items of the arrays that were read so far."""

    def take(self, count_bytes: int) -> bytes:
        end_bytes = self.offset_bytes + count_bytes
        if end_bytes > self.size_bytes:
            raise TornModel(
                f"{self.name} is truncated: its header needs {end_bytes} bytes or more, "
                f"the file has {self.size_bytes}",
                hint="fetch the file again and compare its size with the original",
            )
        if end_bytes > HEADER_BYTES_MAX:
            what = f"its header needs {end_bytes} bytes or more, more than {HEADER_BYTES_MAX}"
            raise corrupt(self.name, what)
        data = self._file.read(count_bytes)
        if len(data) != count_bytes:
            raise TornModel(f"{self.name} became shorter while it was read")
        self.offset_bytes = end_bytes
        return data

    def scalar(self, kind: int) -> int | float | bool:
        layout = SCALARS[kind]
        value: int | float | bool = layout.unpack(self.take(layout.size))[0]
        return value

    def count(self, kind: GGUFValueType = GGUFValueType.UINT64) -> int:
        return int(self.scalar(kind))

    def text(self) -> str:
        data = self.take(self.count())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise corrupt(
                self.name, f"text at byte {self.offset_bytes - len(data)} is not UTF-8"
            ) from error


def corrupt(name: str, what: str) -> TornModel:
    """The error for a file whose bytes contradict each other."""
    return TornModel(f"{name} is corrupt: {what}", hint="fetch the file again")


def _read(cursor: _Cursor, path: Path) -> GgufFile:
    magic = cursor.take(min(4, cursor.size_bytes))
    if magic != MAGIC:
        raise TornModel(
            # Not what it begins with: it may be an answer that was not meant for who reads this.
            f"{cursor.name} is not a GGUF file: it does not begin with {MAGIC!r}",
            hint="check that the download is the model and not an error page or a pointer file",
        )
    version = cursor.count(GGUFValueType.UINT32)
    if version not in VERSIONS:
        raise UnsupportedModel(
            f"{cursor.name} has GGUF version {version}; mesh reads little-endian versions 2 and 3"
        )
    tensor_count, entry_count = cursor.count(), cursor.count()
    if tensor_count > TENSORS_MAX or entry_count > METADATA_ENTRIES_MAX:
        raise corrupt(cursor.name, f"it claims {tensor_count} tensors and {entry_count} entries")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(entry_count):
        key = cursor.text()
        if key in metadata:
            raise corrupt(cursor.name, f"metadata {shown(key)} appears twice")
        metadata[key] = _value(cursor, cursor.count(GGUFValueType.UINT32), 0)
    heads = [_tensor_head(cursor) for _ in range(tensor_count)]
    given = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(given, int) or not _ALIGNMENT.takes(given) or given.bit_count() != 1:
        raise corrupt(cursor.name, f"general.alignment is {shown(given)}")
    alignment_bytes = given
    data_start_bytes = -(-cursor.offset_bytes // alignment_bytes) * alignment_bytes
    tensors: dict[str, GgufTensor] = {}
    for head in heads:
        if head.name in tensors:
            raise corrupt(cursor.name, f"tensor {shown(head.name)} appears twice")
        if head.offset_bytes % alignment_bytes:
            what = f"tensor {shown(head.name)} is not aligned to {alignment_bytes} bytes"
            raise corrupt(cursor.name, what)
        tensors[head.name] = _placed(head, data_start_bytes)
    _check_extent(cursor, tensors)
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _value(cursor: _Cursor, kind: int, nesting: int) -> MetadataValue:
    if kind in SCALARS:
        return cursor.scalar(kind)
    if kind == GGUFValueType.STRING:
        return cursor.text()
    if kind != GGUFValueType.ARRAY or nesting == ARRAY_NESTING_MAX:
        raise corrupt(cursor.name, f"metadata type {kind} before byte {cursor.offset_bytes}")
    item_kind, length = cursor.count(GGUFValueType.UINT32), cursor.count()
    if length > cursor.size_bytes - cursor.offset_bytes:
        cursor.take(length)  # every item takes a byte at least: this raises
    cursor.items += length
    if cursor.items > ARRAY_ITEMS_MAX:
        what = f"its arrays hold {cursor.items} items or more, more than {ARRAY_ITEMS_MAX}"
        raise corrupt(cursor.name, what)
    if item_kind in SCALARS:
        layout = SCALARS[item_kind]
        data = cursor.take(length * layout.size)
        numbers: list[MetadataValue] = np.frombuffer(data, layout.format).tolist()
        return numbers
    return [_value(cursor, item_kind, nesting + 1) for _ in range(length)]


def _tensor_head(cursor: _Cursor) -> GgufTensor:
    name = cursor.text()
    dimensions = cursor.count(GGUFValueType.UINT32)
    if dimensions > TENSOR_DIMENSIONS_MAX:
        raise corrupt(cursor.name, f"tensor {shown(name)} claims {dimensions} dimensions")
    shape = tuple(cursor.count() for _ in range(dimensions))[::-1]
    number, offset_bytes = cursor.count(GGUFValueType.UINT32), cursor.count()
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise UnsupportedModel(
            f"{cursor.name}: tensor {shown(name)} has type {number}, which mesh does not know",
            hint="quantise the model to a type such as Q4_K_M, Q8_0 or F16",
        ) from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row_elements = shape[-1] if shape else 1
    if row_elements % block_elements:
        raise corrupt(
            cursor.name,
            f"rows of tensor {shown(name)} have {row_elements} elements, "
            f"no multiple of {kind.name}'s block of {block_elements}",
        )
    size_bytes = math.prod(shape) // block_elements * block_bytes
    return GgufTensor(
        name=name, type=kind, shape=shape, offset_bytes=offset_bytes, size_bytes=size_bytes
    )


def _placed(head: GgufTensor, data_start_bytes: int) -> GgufTensor:
    """The tensor with its offset counted from the start of the file instead of its data section."""
    return GgufTensor(
        name=head.name,
        type=head.type,
        shape=head.shape,
        offset_bytes=data_start_bytes + head.offset_bytes,
        size_bytes=head.size_bytes,
    )


def _check_extent(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    if not tensors:
        raise UnsupportedModel(f"{cursor.name} holds no tensors: it is no model, or only a part")
    placed = sorted(tensors.values(), key=lambda tensor: tensor.offset_bytes)
    for one, following in pairwise(placed):
        if one.offset_bytes + one.size_bytes > following.offset_bytes:
            raise corrupt(
                cursor.name, f"tensors {shown(one.name)} and {shown(following.name)} overlap"
            )
    last = max(placed, key=lambda tensor: tensor.offset_bytes + tensor.size_bytes)
    end_bytes = last.offset_bytes + last.size_bytes
    if end_bytes > cursor.size_bytes:
        raise TornModel(
            f"{cursor.name} is truncated: tensor {shown(last.name)} ends at byte {end_bytes}, "
            f"the file has {cursor.size_bytes}",
            hint="fetch the file again and compare its size with the original",
        )
