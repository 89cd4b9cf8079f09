"""Takes the weights out of what OpenVINO exports: what is left serves every model of the shape.

`blob_maker` brings the export, a file of the CPU plugin's own format: a text that names version
and ISA, six numbers, custom data, all constants one after the other, and the graph as XML. Weights
are the constants that `graph` named. The graph is made to look for them where `shape_blob` maps the
model's prepared file, and for the rest in the head. What mesh knows of the format is here.
"""

import struct
import xml.etree.ElementTree as ET
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mesh.domain.errors import EngineError
from mesh.domain.values import dataclass
from mesh_nodes.engines.openvino.compiled_import import ATTENTION_TYPE, IMPORTED_TYPE
from mesh_nodes.engines.openvino.graph import ROPE_TABLES
from mesh_nodes.engines.openvino.prepared import Layout
from mesh_nodes.engines.openvino.shape_blob import ShapeBlob, pages

Bytes = npt.NDArray[np.uint8]
"""The bytes of a mapped file."""
_MAGIC = b"RR_UPCVO"
_MAGIC_WITHIN_BYTES = 4096
"""OpenVINO's cache writes a line of its own before it."""
_TEXT = struct.Struct("<8sIQ")
"""Magic, version, and the length of the text that follows."""
_SECTIONS = struct.Struct("<6Q")
"""Begin and length of custom data, constants and graph, counted from here."""
_ALIGNMENT_BYTES = 64
_SMALL_BYTES = 64
"""A constant that is neither weights nor a rope table is a number or a shape, and no longer."""

_INFOS_MADE_ANEW = ("fused_names",)
"""Attributes of an operation that are left out because they are made anew. Others say how it is
computed, for example that it must not be in bf16.
"""


@dataclass(frozen=True, slots=True)
class _Export:
    text: bytes
    """With its magic and lengths."""
    custom: bytes
    constants: Bytes
    graph: ET.Element

    def values(self, constant: ET.Element) -> Bytes:
        data = _data(constant)
        begin = int(data.get("offset", 0))
        return self.constants[begin : begin + int(data.get("size", 0))]


def without_weights(exported: Bytes, stored: Bytes, layout: Layout) -> ShapeBlob:
    """`stored` is the content of the prepared file that the model was compiled from, `layout` its
    layout with the graph's names.

    Raises EngineError when a weight is not in the export as it is stored, or when something else is
    that may be this model's alone.
    """
    export = _parse(exported)
    weights, others = _sorted(export, stored, layout)
    constants_begin = len(export.text) + _SECTIONS.size + len(export.custom)
    padding_bytes = -constants_begin % _ALIGNMENT_BYTES
    constants_begin += padding_bytes
    _leave_out_infos(export.graph)
    kept = _keep_once(export, others)
    weights_begin = pages(constants_begin + len(kept))
    for constant in weights:
        offset = weights_begin + layout.span(constant.get("name", ""))[0]
        _data(constant).set("offset", str(offset - constants_begin))
    graph = _written(export.graph)
    graph_begin = weights_begin + pages(layout.size_bytes)
    base = len(export.text)
    sections = _SECTIONS.pack(
        _SECTIONS.size,
        len(export.custom) + padding_bytes,
        constants_begin - base,
        graph_begin - constants_begin,
        graph_begin - base,
        len(graph),
    )
    head = export.text + sections + export.custom + b" " * padding_bytes + kept
    return ShapeBlob(head=head, graph=graph, weights_bytes=layout.size_bytes)


def _parse(exported: Bytes) -> _Export:
    """Raises EngineError when it is another format."""
    begin = bytes(exported[:_MAGIC_WITHIN_BYTES]).find(_MAGIC)
    if begin < 0:
        raise EngineError("OpenVINO exports another format than mesh knows")
    text_bytes = _TEXT.unpack_from(exported.data, begin)[2]
    base = begin + _TEXT.size + text_bytes
    numbers = _SECTIONS.unpack_from(exported.data, base)
    if numbers[0] != _SECTIONS.size or base + numbers[4] + numbers[5] > len(exported):
        raise EngineError(f"OpenVINO's export has other sections than mesh knows: {numbers}")
    custom, constants, graph = (
        exported[base + first : base + first + size]
        for first, size in zip(numbers[::2], numbers[1::2], strict=True)
    )
    try:
        root = ET.fromstring(bytes(graph).rstrip(b"\0 "))
    except ET.ParseError as error:
        raise EngineError(f"OpenVINO's export has no graph that mesh can read: {error}") from error
    return _Export(bytes(exported[begin:base]), bytes(custom), constants, root)


def _sorted(
    export: _Export, stored: Bytes, layout: Layout
) -> tuple[list[ET.Element], list[ET.Element]]:
    """The constants that are weights, every weight among them by its name, and the others."""
    weights, others, unnamed = [], [], []
    for constant in export.graph.iterfind("layers/layer[@type='Const']"):
        name, values = constant.get("name", ""), export.values(constant)
        if name in layout.tensors:
            if not np.array_equal(values, _stored(name, stored, layout)):
                raise EngineError(f"OpenVINO compiles other values into {name} than are stored")
            weights.append(constant)
        elif len(values) <= _SMALL_BYTES or name in ROPE_TABLES:
            others.append(constant)
        else:
            unnamed.append(constant)
    missing = set(layout.tensors) - {constant.get("name") for constant in weights}
    for constant in unnamed:
        values = export.values(constant)
        # A bias loses its name where it is fused into its matrix product, and the second of two
        # constants over one weight to the first: an embedding of 4 bits that is the head, too.
        names = _equal(values, missing, stored, layout) or _equal(
            values, layout.tensors, stored, layout
        )
        if len(names) != 1:
            raise EngineError(f"{len(values)} bytes compiled are {len(names)} of the weights")
        constant.set("name", names[0])
        weights.append(constant)
    missing -= {constant.get("name") for constant in unnamed}
    if missing:
        raise EngineError(f"the compiled graph has no {min(missing)}")
    return weights, others


def _equal(values: Bytes, names: Iterable[str], stored: Bytes, layout: Layout) -> list[str]:
    return [n for n in names if np.array_equal(values, _stored(n, stored, layout))]


def _stored(name: str, stored: Bytes, layout: Layout) -> Bytes:
    begin, size_bytes = layout.span(name)
    return stored[begin : begin + size_bytes]


def _leave_out_infos(graph: ET.Element) -> None:
    for layer in graph.iterfind("layers/layer"):
        for infos in layer.findall("rt_info"):
            for info in list(infos):
                if info.get("name") in _INFOS_MADE_ANEW:
                    infos.remove(info)
            if not len(infos):
                layer.remove(infos)


def _keep_once(export: _Export, constants: list[ET.Element]) -> bytes:
    """The content of these constants, of which the graph keeps one of each kind, value and what is
    said of it: a layer of a decoder has 25 of them, and an import takes its time by their number.
    """
    content, first, same = bytearray(), dict[tuple[str, str, bytes, bytes], str](), dict[str, str]()
    layers = export.graph.find("layers")
    assert layers is not None
    for constant in constants:
        data, values = _data(constant), bytes(export.values(constant))
        number = constant.get("id", "")
        infos = b"".join(map(ET.tostring, constant.iterfind("rt_info")))
        kind = (data.get("element_type", ""), data.get("shape", ""), infos, values)
        same[number] = first.setdefault(kind, number)
        if same[number] != number:
            layers.remove(constant)
            continue
        content += b"\0" * (-len(content) % _ALIGNMENT_BYTES)
        data.set("offset", str(len(content)))
        content += values
    for edge in export.graph.iterfind("edges/edge"):
        source = edge.get("from-layer", "")
        edge.set("from-layer", same.get(source, source))
    return bytes(content)


def _written(graph: ET.Element) -> bytes:
    """As text, without shapes, which an import makes anew, with the attention that it can make."""
    for layer in graph.iterfind("layers/layer"):
        if layer.get("type") == ATTENTION_TYPE:
            layer.set("type", IMPORTED_TYPE)
        for port in layer.iterfind("*/port"):
            for part in list(port):
                port.remove(part)
    for element in graph.iter():
        element.tail = None
        if element.text is not None and not element.text.strip():
            element.text = None
    return ET.tostring(graph)


def _data(constant: ET.Element) -> ET.Element:
    data = constant.find("data")
    if data is None:
        raise EngineError(f"the constant {constant.get('name')} has no data")
    return data
