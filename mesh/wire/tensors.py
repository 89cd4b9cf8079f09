"""Tensors of the Open Inference Protocol: the inputs that a request brings, read as Python values.

An input has its values in the field of its datatype, or raw. Before: the message. After:
`codec_infer`, which knows what the inputs mean. Each holds one value, but for the stop strings; a
text is one row, and there are no batches.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mesh.domain.errors import InvalidInput
from mesh.v1 import open_inference_pb2 as pb

Value = bool | int | float | str
VALUES_MAX = 64
"""The most values of a tensor."""
TEXT = "BYTES"
_LENGTH = struct.Struct("<I")


class _Datatype(NamedTuple):
    field: str
    """The field of InferTensorContents."""
    code: str
    """The code of `struct` for a raw element; an element of BYTES follows its length."""


_DATATYPES: Mapping[str, _Datatype] = {
    "BOOL": _Datatype("bool_contents", "?"),
    "INT8": _Datatype("int_contents", "b"),
    "INT16": _Datatype("int_contents", "h"),
    "INT32": _Datatype("int_contents", "i"),
    "INT64": _Datatype("int64_contents", "q"),
    "UINT8": _Datatype("uint_contents", "B"),
    "UINT16": _Datatype("uint_contents", "H"),
    "UINT32": _Datatype("uint_contents", "I"),
    "UINT64": _Datatype("uint64_contents", "Q"),
    "FP32": _Datatype("fp32_contents", "f"),
    "FP64": _Datatype("fp64_contents", "d"),
    TEXT: _Datatype("bytes_contents", ""),
}


def read_inputs(
    request: pb.ModelInferRequest, known: Mapping[str, Sequence[str]], several: str
) -> dict[str, list[Value]]:
    """The values of each input, by its name. `known` has the datatypes that each name may have;
    `several` is the one that may hold any number. Raises InvalidInput.
    """
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InvalidInput(
            f"there are {len(raws)} raw_input_contents for {len(request.inputs)} inputs",
            field="raw_input_contents",
        )
    found: dict[str, list[Value]] = {}
    for number, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in known:
            listed = ", ".join(known)
            raise InvalidInput(f"there is no input {name!r}", hint=f"inputs: {listed}", field=name)
        if name in found:
            raise InvalidInput(f"the input {name!r} is given twice", field=name)
        if tensor.datatype not in known[name]:
            wanted = " or ".join(known[name])
            raise _wrong(tensor, f"is of datatype {tensor.datatype!r}; it must be {wanted}")
        count = _count(tensor, several=name == several)
        found[name] = _values(tensor, count, raws[number] if raws else None)
    return found


def _count(tensor: pb.ModelInferRequest.InferInputTensor, *, several: bool) -> int:
    """How many values its shape says it holds."""
    shape = list(tensor.shape)
    if several and len(shape) == 1 and 0 <= shape[0] <= VALUES_MAX:
        return shape[0]
    if shape not in ([1], [1, 1]):
        allowed = f"[0] to [{VALUES_MAX}]" if several else "[1]: one row, no batch"
        raise _wrong(tensor, f"has the shape {shape}; it must be {allowed}")
    return 1


def _values(
    tensor: pb.ModelInferRequest.InferInputTensor, count: int, raw: bytes | None
) -> list[Value]:
    datatype = _DATATYPES[tensor.datatype]
    if raw is None:
        held = getattr(tensor.contents, datatype.field)
        if len(held) != count:
            raise _wrong(tensor, f"has {len(held)} {datatype.field}; its shape says {count}")
        values = list(held)
        for field, _ in tensor.contents.ListFields():
            if field.name != datatype.field:
                raise _wrong(tensor, f"has {field.name} beside {datatype.field}")
        if datatype.code:
            try:
                struct.pack(f"<{count}{datatype.code}", *values)
            except struct.error as error:
                raise _wrong(tensor, f"holds what is no {tensor.datatype}: {error}") from None
    elif tensor.HasField("contents"):
        raise _wrong(tensor, "has contents beside raw_input_contents")
    elif datatype.code:
        form = struct.Struct(f"<{count}{datatype.code}")
        if len(raw) != form.size:
            raise _wrong(tensor, f"has {len(raw)} raw bytes; its shape says {form.size}")
        values = list(form.unpack(raw))
    else:
        values = _elements(tensor, count, raw)
    try:
        return [one.decode() if isinstance(one, bytes) else one for one in values]
    except UnicodeDecodeError as error:
        raise _wrong(tensor, f"is no UTF-8: {error}") from None


def _elements(tensor: pb.ModelInferRequest.InferInputTensor, count: int, raw: bytes) -> list[bytes]:
    """Each after its length in four bytes."""
    found: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(raw) and len(found) < count:
        end = at + _LENGTH.size + _LENGTH.unpack_from(raw, at)[0]
        found.append(raw[at + _LENGTH.size : end])
        at = end
    if len(found) != count or at != len(raw):
        raise _wrong(
            tensor, f"has {len(raw)} raw bytes, which are not {count} elements with their lengths"
        )
    return found


def raw_element(text: str) -> bytes:
    """One of BYTES."""
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def _wrong(tensor: pb.ModelInferRequest.InferInputTensor, what: str) -> InvalidInput:
    return InvalidInput(f"the input {tensor.name!r} {what}", field=tensor.name)
