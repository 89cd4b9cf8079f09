"""Messages of any protobuf type, drawn from its descriptor, and bytes that are nearly one.

Every field may be absent, and holds any value of its wire type: numbers that are not finite, enum
values that nobody knows, names that exist beside ones that do not.
"""

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

DEPTH_MAX = 4
REPEATED_MAX = 3
CHARS_MAX = 40
MUTATIONS_MAX = 4

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 40),
}
_SMALL = st.integers(0, 8)
"""Beside numbers of any size, ones that may be meant."""


@st.composite
def raw_messages(
    draw: Callable[[Any], Any], descriptor: Descriptor, names: Sequence[str], damaged: bool
) -> bytes:
    """A message as it goes over the wire; with `damaged`, bytes that were one. `names` appear in
    its strings.
    """
    message = GetMessageClass(descriptor)()
    _fill(draw, message, names, 0)
    raw = message.SerializeToString()
    return bytes(mutated(draw, bytearray(raw))) if damaged else raw


def _fill(draw: Callable[[Any], Any], message: Message, names: Sequence[str], depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        kind, held = field.message_type, getattr(message, field.name)
        count = draw(st.integers(1, REPEATED_MAX)) if field.is_repeated else 1
        if kind is None and field.is_repeated:
            held.extend(draw(_scalars(field, names)) for _ in range(count))
        elif kind is None:
            setattr(message, field.name, draw(_scalars(field, names)))
        elif depth == DEPTH_MAX or kind.GetOptions().map_entry:
            continue
        elif field.is_repeated:
            for _ in range(count):
                _fill(draw, held.add(), names, depth + 1)
        else:
            held.SetInParent()
            _fill(draw, held, names, depth + 1)


def _scalars(field: Any, names: Sequence[str]) -> st.SearchStrategy[Any]:
    if field.cpp_type in _INTEGERS:
        return _SMALL | _INTEGERS[field.cpp_type]
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return st.floats() | st.floats(0.0, 10.0)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=CHARS_MAX)
    text = st.text(st.characters(codec="utf-8"), max_size=CHARS_MAX)
    return st.sampled_from(list(names)) | text if names else text


def mutated(draw: Callable[[Any], Any], raw: bytearray) -> bytearray:
    for _ in range(draw(st.integers(1, MUTATIONS_MAX))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.sampled_from(["insert", "change", "cut"])):
            case "change" if at < len(raw):
                raw[at] = draw(st.integers(0, 255))
            case "cut":
                del raw[at : at + draw(st.integers(1, 8))]
            case _:
                raw[at:at] = draw(st.binary(min_size=1, max_size=8))
    return raw
