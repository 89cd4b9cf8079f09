"""Reads safetensors files of the store without copying: one mapped view per tensor.

Owns the maps, which live as long as a view of them does. `weights` takes tensors from here by their
Hugging Face names; one file or shards with an index, f16, bf16 and f32; and, of a model that was a
GGUF file, the 4-bit blocks that the file had in their place.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import TornModel, UnsupportedModel
from mesh.domain.values import dataclass
from mesh_loader.gguf_names import BLOCKS_FILE as BLOCKS
from mesh_nodes.engines.openvino.mapped_file import MappedFile

_ELEMENTS: dict[str, np.dtype[Any]] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "F32": np.dtype(np.float32),
}
_BLOCKS = {"U8": np.dtype(np.uint8)}
_HEADER_BYTES_MAX = 100 * 2**20
"""The format's own limit on its header."""
_LENGTH_BYTES = 8
"""The header's length comes before it."""
_F16_BITS = np.int32(-0x80000000 | 0x0FFFE000)
"""The bits of an f32 that an f16 fills once it is shifted left by 13: its sign at the top, and its
exponent and mantissa below.
"""
_F16_MAX = float(np.finfo(np.float16).max)
_F16_BIAS = np.float32(2.0 ** (127 - 15))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the file. bf16 is held as its upper 16 bits."""

    data: npt.NDArray[np.generic]
    element: str
    name: str

    def as_f32(self) -> npt.NDArray[np.float32]:
        out = np.empty(self.data.shape, np.float32)
        self.read_f32(slice(None), out)
        return out

    def read_f32(self, rows: slice, out: npt.NDArray[np.float32]) -> None:
        """These rows into `out`, which is of their shape. Exact for finite values."""
        data = self.data[rows]
        if self.element == "BF16":
            bits = out.view(np.uint32)
            np.copyto(bits, data)
            np.left_shift(bits, 16, out=bits)
        elif self.element == "F16":
            # Four times as fast as numpy's conversion: sign, exponent and mantissa to their places,
            # and the exponent's bias made good, which holds for subnormal numbers, too.
            signed = out.view(np.int32)
            np.copyto(signed, data.view(np.int16))
            np.left_shift(signed, 13, out=signed)
            np.bitwise_and(signed, _F16_BITS, out=signed)
            np.multiply(out, _F16_BIAS, out=out)
        else:
            np.copyto(out, data)

    def as_f16(self) -> npt.NDArray[np.float16]:
        """Without a copy where the file has f16. Raises UnsupportedModel for what is beyond it."""
        if self.element == "F16":
            return self.data.view(np.float16)
        values = self.as_f32()
        largest = float(np.abs(values).max(initial=0.0))
        if largest > _F16_MAX:
            raise UnsupportedModel(
                f"the OpenVINO engine holds tensor {self.name} in f16: its largest value is "
                f"{largest:.6g}, more than {_F16_MAX:.0f}",
                hint="deploy it with spec.weights i8 or i4",
            )
        return values.astype(np.float16)


class Checkpoint:
    """All tensors of a store folder, by name."""

    def __init__(self, model_path: Path) -> None:
        """Maps the folder's files. Raises TornModel when one is missing, cut short or corrupt."""
        self._tensors: dict[str, StoredTensor] = {}
        self.maps: list[MappedFile] = []
        for path in _files(model_path):
            mapped, tensors = _read(path, _ELEMENTS)
            self.maps.append(mapped)
            self._tensors.update(tensors)
        self._blocks: dict[str, tuple[str, StoredTensor]] = {}
        if (model_path / BLOCKS).exists():
            mapped, blocks = _read(model_path / BLOCKS, _BLOCKS)
            self.maps.append(mapped)
            for name, tensor in blocks.items():
                of, _, kind = name.partition(":")
                self._blocks[of] = kind, tensor

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The named tensor. Raises TornModel when it is missing or of another shape."""
        stored = self._tensors.get(name)
        if stored is None:
            raise TornModel(f"the model has no tensor {name}")
        if stored.data.shape != shape:
            raise TornModel(f"tensor {name} is {stored.data.shape}, config.json asks for {shape}")
        return stored

    def blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """The type, as llama.cpp names it, and the blocks of a tensor that had 4 bits in its file:
        [rows, bytes of a row].
        """
        found = self._blocks.get(name)
        return None if found is None else (found[0], found[1].data.view(np.uint8))


def _files(model_path: Path) -> list[Path]:
    index = model_path / "model.safetensors.index.json"
    if not index.exists():
        return [model_path / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise TornModel(f"{index} cannot be read: {error}") from error
    return [model_path / Path(name).name for name in names]


def _read(
    path: Path, elements: dict[str, np.dtype[Any]]
) -> tuple[MappedFile, dict[str, StoredTensor]]:
    try:
        mapped = MappedFile(path)
        header_bytes = int.from_bytes(mapped.bytes_at(0, _LENGTH_BYTES), "little")
        if not 0 < header_bytes <= min(_HEADER_BYTES_MAX, mapped.size_bytes - _LENGTH_BYTES):
            raise ValueError(f"its header of {header_bytes} bytes is beyond the file's end")
        header = json.loads(mapped.bytes_at(_LENGTH_BYTES, header_bytes))
        header.pop("__metadata__", None)
        begin = _LENGTH_BYTES + header_bytes
        return mapped, {
            name: _tensor(mapped, begin, name, header[name], elements) for name in header
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TornModel(f"{path} cannot be read: {error}") from error


def _tensor(
    mapped: MappedFile,
    begin: int,
    name: str,
    entry: dict[str, Any],
    elements: dict[str, np.dtype[Any]],
) -> StoredTensor:
    element, shape = str(entry["dtype"]), tuple(entry["shape"])
    if element not in elements:
        raise UnsupportedModel(
            f"tensor {name} is {element}", hint=f"supported: {', '.join(elements)}"
        )
    dtype = elements[element]
    first, last = entry["data_offsets"]
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if last - first != size_bytes or begin + last > mapped.size_bytes:
        raise ValueError(
            f"tensor {name} of {size_bytes} bytes is given bytes {first} to {last} "
            f"of {mapped.size_bytes - begin}"
        )
    return StoredTensor(mapped.array(dtype, shape, begin + first), element, name)
