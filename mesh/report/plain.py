"""Domain values as plain ones, for JSON and YAML: the field names are the domain's, units and all.

`output` prints them; scripts read them. An enum is its text, a tuple a list, a table of pairs
(refusals by reason) an object, a number that is not finite null: JSON has no word for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # asyncio with it, which most commands of `mesh` do without
    from mesh.runtime.turns import Steps

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

PIECE_ENTRIES = 128
"""So many names and values are a piece: 60 kB of a large cell, written in a fraction of 1 ms."""
_PAIRS = frozenset({"refused", "failed", "footprints"})
"""Fields that hold (key, value) pairs."""
_IF_ANY = frozenset({"by_class"})
"""Fields that are left out where they are empty."""
_APART = _PAIRS | _IF_ANY
_AS_THEY_ARE = frozenset({NoneType, bool, int, str})
_MAKERS: dict[type[Any], Callable[[Any], Plain]] = {}
_NAMES: dict[type[Any], tuple[str, ...]] = {}
"""By type, once it was seen: a picture of 500 deployments has 100,000 values."""


def plain(value: object) -> Plain:
    """Raises TypeError for what has no plain form."""
    make = _MAKERS.get(type(value))
    if make is None:
        make = _MAKERS[type(value)] = _maker(type(value))
    return make(value)


_ENCODER = msgspec.json.Encoder(enc_hook=plain)


def plain_json(value: object) -> bytes:
    """As JSON in UTF-8, without making it plain first: of what holds no table of pairs."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:  # it has half a character
        return json.dumps(plain(value), ensure_ascii=False).encode("utf-8", "replace")


def json_pieces(data: Mapping[str, object], depth: int) -> "Steps[list[bytes]]":
    """The JSON of `data`, in pieces of PIECE_ENTRIES entries. Values that are nested deeper than
    `depth` are encoded in one step each.
    """
    pieces, entries = [], []
    for entry in _entries(data, depth):
        entries.append(entry)
        if len(entries) == PIECE_ENTRIES:
            pieces.append(b"".join(entries))
            entries.clear()
        yield
    return [*pieces, b"".join(entries)]


def _entries(value: object, depth: int) -> Iterator[bytes]:
    if isinstance(value, Mapping) and value and depth:
        mark = b"{"
        for name, inner in value.items():
            yield mark + plain_json(name) + b":"
            yield from _entries(inner, depth - 1)
            mark = b","
        yield b"}"
    elif isinstance(value, list) and value and depth:
        mark = b"["
        for inner in value:
            yield mark
            yield from _entries(inner, depth - 1)
            mark = b","
        yield b"]"
    else:
        yield plain_json(value)


def plain_fields(value: object) -> dict[str, Plain]:
    """The fields of a dataclass, or of a mapping, as plain values."""
    found = plain(value)
    assert isinstance(found, dict)
    return found


def members(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are, but for tables of pairs and for those of _IF_ANY."""
    kind = type(value)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind))
    found = {name: getattr(value, name) for name in _NAMES[kind]}
    for name in _APART & found.keys():
        if name in _IF_ANY and not found[name]:
            del found[name]
        elif isinstance(found[name], tuple):
            found[name] = dict(found[name])
    return found


def _maker(kind: type[Any]) -> Callable[[Any], Plain]:
    """What makes values of this type plain. Raises TypeError."""
    if issubclass(kind, Enum):
        return lambda value: plain(value.value)
    if issubclass(kind, float):
        return lambda value: float(value) if isfinite(value) else None
    if issubclass(kind, NoneType | bool | int | str):
        return lambda value: value
    if issubclass(kind, Mapping):
        return lambda value: {str(plain(key)): plain(item) for key, item in value.items()}
    if issubclass(kind, list | tuple):
        return lambda value: [plain(item) for item in value]
    if is_dataclass(kind):
        return lambda value: {
            name: inner if type(inner) in _AS_THEY_ARE else plain(inner)
            for name, inner in members(value).items()
        }
    raise TypeError(f"{kind.__name__} has no plain form")
