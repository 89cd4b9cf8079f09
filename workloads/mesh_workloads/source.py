"""A trace file as rows of named cells, read line by line.

Every complaint names the file, the line and the column. A line is bounded, so that a file that is
no trace cannot fill the memory. What the columns mean, the modules in `formats` know.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import InvalidInput, NotFound, StorageError

LINE_CHARS_MAX = 1 << 20
"""A day's row of the Azure Functions 2019 trace has about 10,000."""
HINT = "correct the file, or leave the line out"
_SHOWN_CHARS_MAX = 40
_DIGITS_MAX = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a file, by the names of its columns."""

    path: Path
    line: int
    """From 1, the header included."""
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        value = self.cells[column].strip()
        if not value:
            raise self.wrong(column, "is empty")
        return value

    def integer(self, column: str, most: int) -> int:
        """A whole number from 0 to `most`."""
        value = self.text(column)
        if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS_MAX):
            raise self.wrong(column, f"is {shown(value)}; it must be a whole number, 0 or more")
        if int(value) > most:
            raise self.wrong(column, f"is {value}; it must be at most {most}")
        return int(value)

    def number(self, column: str, most: float) -> float:
        """A finite number from 0 to `most`."""
        value = self.text(column)
        try:
            number = float(value) if value.isascii() and "_" not in value else math.nan
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise self.wrong(column, f"is {shown(value)}; it must be a number")
        if not 0 <= number <= most:
            raise self.wrong(column, f"is {value}; it must be from 0 to {most:g}")
        return number

    def wrong(self, column: str, why: str, *, hint: str = HINT) -> InvalidInput:
        return InvalidInput(f"{self.path}:{self.line}: column {column} {why}", hint=hint)


def shown(text: str) -> str:
    """A value in a message: quoted, and cut where it is long."""
    return repr(text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…")


def header(path: Path) -> tuple[str, ...]:
    """The names of the columns: of CSV by the first line, of JSONL by the first line's keys."""
    for line, text in _lines(path):
        if text.lstrip().startswith("{"):
            return tuple(_object(path, line, text))
        return tuple(name.strip() for name in _split(path, line, text))
    raise InvalidInput(f"{path}:1: the file is empty", hint="a trace has at least a header line")


def rows(path: Path) -> Iterator[Row]:
    """All lines but the header; blank lines are skipped."""
    names: tuple[str, ...] | None = None
    for line, text in _lines(path):
        if text.lstrip().startswith("{") and (names is None or names == ()):
            names = ()
            yield Row(path=path, line=line, cells=_object(path, line, text))
        elif names == ():
            raise InvalidInput(f"{path}:{line}: column 1: {shown(text)} begins no JSON object")
        elif names is None:
            names = tuple(name.strip() for name in _split(path, line, text))
        else:
            yield Row(path=path, line=line, cells=_named(path, line, names, text))


def _named(path: Path, line: int, names: tuple[str, ...], text: str) -> dict[str, str]:
    cells = _split(path, line, text)
    if len(cells) < len(names):
        raise InvalidInput(
            f"{path}:{line}: column {names[len(cells)]} is missing: the line has {len(cells)} of "
            f"{len(names)} columns",
            hint="the file may be torn; fetch it again",
        )
    if len(cells) > len(names):
        raise InvalidInput(
            f"{path}:{line}: column {len(names) + 1} has no name: the line has {len(cells)} "
            f"columns, the header {len(names)}"
        )
    return dict(zip(names, cells, strict=True))


def _split(path: Path, line: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise InvalidInput(f"{path}:{line}: no line of CSV: {error}") from error


def _object(path: Path, line: int, text: str) -> dict[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        column = error.colno if isinstance(error, json.JSONDecodeError) else 1
        raise InvalidInput(
            f"{path}:{line}: column {column}: not valid JSON: {shown(text)}",
            hint="the file may be torn; fetch it again",
        ) from error
    return {key: _cell(cell) for key, cell in value.items()}


def _cell(value: object) -> str:
    """A JSON number or string as text, a list as JSON; the kind of anything else, which no column
    may have.
    """
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return json.dumps(value)
    return f"<{type(value).__name__}>"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers, without their ends."""
    line = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            while text := file.readline(LINE_CHARS_MAX + 1):
                line += 1
                if len(text) > LINE_CHARS_MAX:
                    raise InvalidInput(
                        f"{path}:{line}: column {LINE_CHARS_MAX}: the line is longer than "
                        f"{LINE_CHARS_MAX} characters"
                    )
                if text.strip():
                    yield line, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path}:{line + 1}: not UTF-8 text: {error.reason}", hint=HINT
        ) from error
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no file {path}", hint="give the path of a trace, from the current folder"
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
