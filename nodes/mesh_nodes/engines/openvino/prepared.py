"""The engine's derived weights beside a model: one flat, aligned file and its index.

Written once into `prepared/<key>/`, renamed into place when complete, mapped without a copy by
every load. Removing the folder is safe: a load without it derives the weights again, only slower.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from mesh.domain.errors import StorageError
from mesh.domain.values import dataclass, replace
from mesh_loader import locks
from mesh_loader.digests import write_index
from mesh_nodes.engines.openvino.mapped_file import MappedFile
from mesh_nodes.engines.openvino.weights import Array, in_halves

_ALIGNMENT_BYTES = 64
"""A cache line, and what OpenVINO asks of a constant that it takes without a copy."""
WRITING_S_MAX = 3600.0
"""No writer lives longer, so that a scratch folder this old is nobody's."""
Entry = Mapping[str, Any]
"""The entry of an array in the index: its dtype, shape and offset."""
_INDEX = "index.json"
_WEIGHTS = "weights.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where which array lies in a file of prepared weights: alike for all models of a shape."""

    path: Path
    size_bytes: int
    tensors: Mapping[str, Entry]
    """By name."""

    def span(self, name: str) -> tuple[int, int]:
        """Offset and bytes of this array."""
        entry = self.tensors[name]
        return entry["offset"], _size_bytes(entry)

    def in_halves(self) -> "Layout":
        """See `weights.in_halves`."""
        return replace(self, tensors=in_halves(self.tensors, _halves))


def _size_bytes(entry: Entry) -> int:
    return int(np.prod(entry["shape"], dtype=np.int64)) * np.dtype(entry["dtype"]).itemsize


def _halves(entry: Entry) -> list[Entry]:
    """Its first rows and, as many, its last."""
    half = {**entry, "shape": [entry["shape"][0] // 2, *entry["shape"][1:]]}
    return [half, {**half, "offset": entry["offset"] + _size_bytes(half)}]


def prepared_path(model_path: Path, key: str) -> Path:
    return model_path / "prepared" / key


def drop_prepared(model_path: Path, key: str) -> None:
    """Who has it mapped keeps it. It is derived anew from the originals, if they are there."""
    shutil.rmtree(prepared_path(model_path, key), ignore_errors=True)


def write_prepared(model_path: Path, key: str, weights: Iterator[tuple[str, Array]]) -> None:
    """Write all arrays, one at a time, and rename the folder into place.

    Raises StorageError when the store cannot be written. A second writer of the same key loses
    quietly: both wrote the same.
    """
    target = prepared_path(model_path, key)
    try:
        target.parent.mkdir(exist_ok=True)
        _sweep(target)
        scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=target.parent))
    except OSError as error:
        raise _not_written(target, error) from error
    try:
        with locks.locked_if_free(scratch):
            index = _write_weights(scratch / _WEIGHTS, weights)
            _write_text(scratch / _INDEX, json.dumps(index))
            write_index(scratch)
            _put_in_place(scratch, target)
    except OSError as error:
        raise _not_written(target, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_layout(model_path: Path, key: str) -> Layout | None:
    """None when there are no prepared weights, or their file is not as long as their index says."""
    folder = prepared_path(model_path, key)
    path = folder / _WEIGHTS
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if path.stat().st_size != index["bytes"]:
            return None
        return Layout(path=path, size_bytes=index["bytes"], tensors=index["tensors"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_prepared(model_path: Path, key: str) -> tuple[MappedFile, dict[str, Array]] | None:
    """The mapped file and its weights by name; None when there are none, or they are torn.

    Raises BlockingIOError where somebody has them open for writing.
    """
    layout = read_layout(model_path, key)
    if layout is None:
        return None
    try:
        mapped = MappedFile(layout.path)
        return mapped, {
            name: mapped.array(np.dtype(entry["dtype"]), tuple(entry["shape"]), entry["offset"])
            for name, entry in layout.tensors.items()
        }
    except BlockingIOError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sweep(target: Path) -> None:
    """Remove what a writer that was stopped or killed has left."""
    for folder in target.parent.glob(f".{target.name}-*"):
        with suppress(FileNotFoundError):
            old = time.time() - folder.stat().st_mtime > WRITING_S_MAX
            if old or locks.abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(scratch: Path, target: Path) -> None:
    """Rename; what is already there stays if it is whole, since another writer was quicker."""
    try:
        scratch.rename(target)
    except OSError:
        if read_layout(target.parent.parent, target.name) is not None:
            return
        shutil.rmtree(target)
        scratch.rename(target)


def _write_weights(path: Path, weights: Iterator[tuple[str, Array]]) -> dict[str, Any]:
    tensors: dict[str, Entry] = {}
    written: list[Future[None]] = []
    size_bytes = 0
    # One array is written while the next one is being made.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "mesh-write") as writer:
        for name, array in weights:
            offset = size_bytes + -size_bytes % _ALIGNMENT_BYTES
            tensors[name] = {"dtype": array.dtype.name, "shape": array.shape, "offset": offset}
            size_bytes = offset + array.nbytes
            for earlier in written:
                earlier.result()
            written = [writer.submit(_write_array, file, array, offset)]
        for last in written:
            last.result()
        os.fsync(file.fileno())
    return {"bytes": size_bytes, "tensors": tensors}


def _write_array(file: FileIO, array: Array, offset: int) -> None:
    left = np.ascontiguousarray(array).data.cast("B")
    while left:
        done = os.pwrite(file.fileno(), left, offset)
        left, offset = left[done:], offset + done


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _not_written(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"prepared weights cannot be written to {path}: {error.strerror or error}",
        hint="free disk space or make the model store writable",
    )
