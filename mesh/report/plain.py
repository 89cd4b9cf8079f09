"""Domain values as plain ones, for JSON and YAML: the field names are the domain's, units and all.

`output` prints them; scripts read them. An enum is its text, a tuple a list, a table of pairs
(refusals by reason) an object, a number that is not finite null: JSON has no word for it.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

_PAIRS = frozenset({"refused", "failed", "footprints"})
"""Fields that hold (key, value) pairs."""


def plain(value: object) -> Plain:
    """Raises TypeError for what has no plain form."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float) and not isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _field(field.name, getattr(value, field.name)) for field in fields(value)
        }
    raise TypeError(f"{type(value).__name__} has no plain form")


def plain_fields(value: object) -> dict[str, Plain]:
    """The fields of a dataclass, or of a mapping, as plain values."""
    found = plain(value)
    assert isinstance(found, dict)
    return found


def _field(name: str, value: object) -> Plain:
    if name in _PAIRS and isinstance(value, tuple):
        return plain(dict(value))
    return plain(value)
