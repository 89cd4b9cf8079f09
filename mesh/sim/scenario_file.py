"""A scenario's TOML as values, strictly: a number is no text, and an unknown key is an error.

What cannot be meant is said with its place in the file and what would do there. Before: a file.
After: `scenario`, which says what values it has.
"""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from cattrs import BaseValidationError, Converter, transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.preconf.json import make_converter
from cattrs.v import format_exception

from mesh.domain.errors import InvalidInput, MeshError, NotFound

T = TypeVar("T")
HINT = "workloads/ has scenarios, docs/simulator.md explains every key"
_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def strict_converter() -> Converter:
    """For TOML: nothing is turned into something else, but for a whole number that may be any."""
    made = make_converter(forbid_extra_keys=True)
    for kind in _WORDS:
        made.register_structure_hook(kind, _exactly(kind))
    return made


def read_toml(path: Path, converter: Converter, kind: type[T]) -> T:
    """Raises NotFound when the file cannot be read, InvalidInput when it holds no such value."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise NotFound(f"cannot read the scenario {path}: {why}", hint=HINT) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{path} is no TOML: {error}", hint=HINT) from error
    try:
        return converter.structure(raw, kind)
    except BaseValidationError as error:
        words, _, place = transform_error(error, format_exception=_words)[0].rpartition(" @ $")
        where = place.lstrip(".")
        raise InvalidInput(f"{path}: {f'{where}: ' if where else ''}{words}", hint=HINT) from error


def _exactly(kind: type) -> Callable[[Any, Callable[[Any], Any]], Any]:
    def structure(raw: Any, asked: Callable[[Any], Any]) -> Any:
        if asked is not kind:  # an enum of texts
            return asked(raw)
        if type(raw) is kind or (kind is float and type(raw) is int):
            return asked(raw)
        raise ValueError(f"{raw!r} is not {_WORDS[kind]}")

    return structure


def _words(error: BaseException, kind: type | None) -> str:
    """A value error says which value it met, and errors of mesh say what they mean."""
    if isinstance(error, MeshError):
        return error.message
    if isinstance(error, ForbiddenExtraKeysError):
        return _unknown(error)
    if isinstance(error, KeyError):
        return "it is missing"
    if isinstance(error, ValueError) and isinstance(kind, type) and issubclass(kind, Enum):
        return f"{str(error).partition(' is not ')[0]} is none of {', '.join(kind)}"
    return str(error) if type(error) is ValueError else format_exception(error, kind)


def _unknown(error: ForbiddenExtraKeysError) -> str:
    name, known = min(error.extra_fields), [field.name for field in fields(error.cl)]
    close = difflib.get_close_matches(name, known, n=1)
    return f"there is no {name} here; " + (
        f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    )
