"""Domain values as plain ones, for JSON and YAML: the field names are the domain's, units and all.

`output` prints them; scripts read them. An enum is its text, a tuple a list, a table of pairs
(refusals by reason) an object, a number that is not finite null: JSON has no word for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from types import NoneType
from typing import Any

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

_PAIRS = frozenset({"refused", "failed", "footprints"})
"""Fields that hold (key, value) pairs."""
_AS_THEY_ARE = frozenset({NoneType, bool, int, str})
_MAKERS: dict[type[Any], Callable[[Any], Plain]] = {}
"""By type, once it was seen: a picture of 500 deployments has 100,000 values."""


def plain(value: object) -> Plain:
    """Raises TypeError for what has no plain form."""
    make = _MAKERS.get(type(value))
    if make is None:
        make = _MAKERS[type(value)] = _maker(type(value))
    return make(value)


def plain_fields(value: object) -> dict[str, Plain]:
    """The fields of a dataclass, or of a mapping, as plain values."""
    found = plain(value)
    assert isinstance(found, dict)
    return found


def _maker(kind: type[Any]) -> Callable[[Any], Plain]:
    """What makes values of this type plain. Raises TypeError."""
    if issubclass(kind, Enum):
        return lambda value: plain(value.value)
    if issubclass(kind, float):
        return lambda value: value if isfinite(value) else None
    if issubclass(kind, NoneType | bool | int | str):
        return lambda value: value
    if issubclass(kind, Mapping):
        return lambda value: {str(plain(key)): plain(item) for key, item in value.items()}
    if issubclass(kind, list | tuple):
        return lambda value: [plain(item) for item in value]
    if is_dataclass(kind):
        return _fields_maker([field.name for field in fields(kind)])
    raise TypeError(f"{kind.__name__} has no plain form")


def _fields_maker(names: Sequence[str]) -> Callable[[Any], Plain]:
    pairs = [name for name in names if name in _PAIRS]

    def make(value: Any) -> Plain:
        found = {name: getattr(value, name) for name in names}
        for name in pairs:
            if isinstance(found[name], tuple):
                found[name] = dict(found[name])
        for name, inner in found.items():
            if type(inner) not in _AS_THEY_ARE:
                found[name] = plain(inner)
        return found

    return make
