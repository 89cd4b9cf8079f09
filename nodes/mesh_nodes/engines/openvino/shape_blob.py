"""A compiled model without its weights, kept as a file and bound to any model of the same shape.

`exported` makes one, `blob_folder` keeps them, `compiled_import` hands a bound one to OpenVINO. In
memory a bound blob is one range of addresses: the head (OpenVINO's headers and all constants but
the weights), the model's prepared weights, the graph that refers to both. All of it are files'
pages, mapped: nothing is copied, and models that lie in the page cache are read from there.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mesh.domain.values import dataclass
from mesh_loader.page_cache import read_ahead
from mesh_nodes.engines.file_guard import FileGuard
from mesh_nodes.engines.openvino.architecture import Architecture
from mesh_nodes.engines.openvino.prepared import Layout
from mesh_nodes.engines.page_range import PAGE_BYTES, PageRange

_KEY_VERSION = 3
"""The version rises whenever `graph` builds another graph, or `exported` makes another blob of it.
"""
_DIGITS = 24
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
"""As x86 and Arm name them."""


def shape_key(
    *,
    architecture: Architecture,
    context_tokens_max: int,
    layout: Layout,
    properties: Mapping[str, object],
    platform: Mapping[str, str],
) -> str:
    """The name of a blob: a hash of everything that a compiled graph holds besides the weights.

    Whatever changes the compiled graph must change the key. `properties`: those that the model is
    compiled with. `platform`: OpenVINO and the CPU, which decide which kernels OpenVINO chooses.
    The key ends with the context limit: a node can say for which limits its blobs are.
    """
    shape = {
        "version": _KEY_VERSION,
        "architecture": asdict(architecture),
        "context_tokens_max": context_tokens_max,
        "layout": {"bytes": layout.size_bytes, "tensors": dict(layout.tensors)},
        "properties": dict(properties),
        "platform": dict(platform),
    }
    text = json.dumps(shape, sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}-{context_tokens_max}"


def context_of(key: str) -> int | None:
    """The context limit that a key is for; None where it is no key."""
    digits, _, context = key.rpartition("-")
    return int(context) if len(digits) == _DIGITS and context.isdecimal() else None


def cpu_fields(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What the system says of the first processor; nothing where it says nothing."""
    try:
        first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: fields[name] for name in _CPU_FIELDS if name in fields}


_VERSION = 1
"""The version of the file's form, and of what `exported` puts into it."""
_PREFACE_BYTES = PAGE_BYTES
"""A line of JSON, and blanks up to the page on which the head begins."""


def pages(size_bytes: int) -> int:
    """The size in whole pages, in bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeBlob:
    """In OpenVINO's order: head, weights, graph, each beginning with a page."""

    head: bytes
    graph: bytes
    weights_bytes: int

    def write(self, path: Path, key: str) -> None:
        """Raises OSError. The file is on the disk when it returns, but not its name."""
        content = self.head.ljust(pages(len(self.head)), b"\0") + self.graph
        preface = {
            "version": _VERSION,
            "key": key,
            "head_bytes": pages(len(self.head)),
            "graph_bytes": len(self.graph),
            "weights_bytes": self.weights_bytes,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        # The store checks it, and knows nothing else of the file.
        check = hashlib.sha256(json.dumps(preface).encode()).hexdigest()
        preface["preface_sha256"] = check
        with path.open("wb") as file:
            file.write(json.dumps(preface).encode().ljust(_PREFACE_BYTES))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


class BoundBlob:
    """A blob of this key in memory, with the weights of one model in it."""

    def __init__(self, path: Path, key: str, weights: Layout) -> None:
        """The weights are read ahead of who imports it. Raises OSError when a file cannot be read,
        ValueError when the blob is damaged or not of this key, OutOfMemory when there are no
        addresses.
        """
        self._guard, self._blob_guard = FileGuard(weights.path), FileGuard(path)
        model = self._guard.descriptor
        # What is guarded, whatever is renamed to this path meanwhile.
        with open(self._blob_guard.descriptor, "rb", closefd=False) as blob:
            preface = _preface(blob.read(_PREFACE_BYTES), key, weights)
            head_bytes, graph_bytes = preface["head_bytes"], preface["graph_bytes"]
            size_bytes = os.fstat(blob.fileno()).st_size
            if size_bytes != _PREFACE_BYTES + head_bytes + graph_bytes:
                raise ValueError(
                    f"it has {size_bytes} bytes, its first page says "
                    f"{_PREFACE_BYTES + head_bytes + graph_bytes}"
                )
            # From where the file was read up to: the first page is not part of it.
            if hashlib.file_digest(blob, "sha256").hexdigest() != preface.get("sha256"):
                raise ValueError("its content is not what was written")
            if os.fstat(model).st_size != weights.size_bytes:
                raise ValueError(f"{weights.path} has changed its size")
            graph_begin = head_bytes + pages(weights.size_bytes)
            self._range = PageRange(graph_begin + graph_bytes)
            self._range.map_file(blob.fileno(), _PREFACE_BYTES, head_bytes, 0)
            self._range.map_file(model, 0, weights.size_bytes, head_bytes)
            graph_at = _PREFACE_BYTES + head_bytes
            self._range.map_file(blob.fileno(), graph_at, graph_bytes, graph_begin)
        self._weights = head_bytes, graph_begin
        self._end_reading = read_ahead(weights.path)
        weakref.finalize(self, self._end_reading)
        self._size_bytes = graph_begin + graph_bytes

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        """All of it, as `import_model` takes it: writable, though nobody writes to it."""
        return self._range.array(np.dtype(np.uint8), (self._size_bytes,), 0)

    def release_pages(self) -> None:
        """Those of the weights; see `mapped_file.Pages`."""
        self._range.free_pages(*self._weights)

    def settle(self) -> None:
        """What was to be read has been; see `FileGuard`."""
        self._end_reading()
        self._guard.settle()
        self._blob_guard.settle()


def _preface(page: bytes, key: str, weights: Layout) -> dict[str, Any]:
    preface = json.loads(page)
    if not isinstance(preface, dict) or preface.get("version") != _VERSION:
        raise ValueError("its first page is not one that this mesh wrote")
    if (preface.get("key"), preface.get("weights_bytes")) != (key, weights.size_bytes):
        raise ValueError(
            f"it is of key {preface.get('key')} with {preface.get('weights_bytes')} bytes of "
            f"weights, wanted is {key} with {weights.size_bytes}"
        )
    if not all(isinstance(preface.get(name), int) for name in ("head_bytes", "graph_bytes")):
        raise ValueError("its first page lacks its sizes")
    return preface
