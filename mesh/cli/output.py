"""The only printer: data to stdout, messages to stderr.

It owns alignment, colour, the JSON and YAML forms and the two lines of an error. Data is never
wrapped or cut; colour and control of the cursor appear on a terminal only, and never with NO_COLOR.
`tables` says what the rows hold; `progress` draws long work.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Generic, TextIO, TypeVar

import yaml
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mesh.domain.errors import (
    AlreadyExists,
    Cancelled,
    InvalidInput,
    MeshError,
    ModelError,
    NotFound,
    OutOfMemory,
    StorageError,
    Unavailable,
)
from mesh.domain.values import dataclass
from mesh.report.plain import Plain, plain

T = TypeVar("T")
GAP = "  "
NOTHING = "-"
"""An empty cell: so that every line of a table has the same number of words."""


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"
    """The form for other programs: it is there for what is a table of numbers."""


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """What a table of T shows under a header; None is an empty cell."""

    header: str
    cell: Callable[[T], object]
    right: bool


def word(header: str, cell: Callable[[T], object]) -> Column[T]:
    return Column(header, cell, right=False)


def number(header: str, cell: Callable[[T], object]) -> Column[T]:
    """Right-aligned."""
    return Column(header, cell, right=True)


def text_columns(headers: Sequence[str], words: int = 1) -> list[Column[Sequence[str]]]:
    """The columns of rows that are text already; those after the first `words` are numbers."""
    return [Column(header, itemgetter(n), n >= words) for n, header in enumerate(headers)]


_STYLES = {
    "ready": "green",
    "yes": "green",
    "importing": "yellow",
    "saving": "yellow",
    "loading": "yellow",
    "draining": "yellow",
    "parked": "cyan",
    "waiting": "yellow",
    "unloading": "yellow",
    "deleting": "yellow",
    "lost": "red",
    "no": "red",
}


def table(columns: Sequence[Column[T]], items: Iterable[T]) -> None:
    """Aligned columns, a row an item. Cells of the words of a state are coloured on a terminal."""
    lines(table_lines(columns, items))


def next_table(columns: Sequence[Column[T]], items: Iterable[T]) -> None:
    """The same below what was written before, with an empty line between."""
    text("")
    table(columns, items)


def comma_separated(columns: Sequence[Column[T]], items: Iterable[T]) -> None:
    """The same cells as in a table (RFC 4180)."""
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow([column.header.lower() for column in columns])
    rows.writerows([column.cell(item) for column in columns] for item in items)
    sys.stdout.flush()


def lines(shown: Sequence[Text]) -> None:
    """Whole lines, each as long as it is."""
    for line in shown:
        _write_line(sys.stdout, line)


def table_lines(columns: Sequence[Column[T]], items: Iterable[T]) -> list[Text]:
    """A table as lines, for whoever draws it among other things."""
    cells = [[column.header for column in columns]]
    cells += [[_cell(column.cell(item)) for column in columns] for item in items]
    widths = [max(cell_len(row[index]) for row in cells) for index in range(len(columns))]
    shown = []
    for number, row in enumerate(cells):
        line = Text(end="")
        for index, (column, cell) in enumerate(zip(columns, row, strict=True)):
            padding = " " * (widths[index] - cell_len(cell))
            line.append(padding if column.right else "")
            line.append(cell, style="bold" if number == 0 else _STYLES.get(cell, ""))
            if index < len(columns) - 1:
                line.append(GAP if column.right else padding + GAP)
        shown.append(line)
    return shown


def _cell(value: object) -> str:
    return (_one_line(str(value)) if value is not None else "") or NOTHING


def fields(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair a line, the values aligned."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        line = Text(f"{name:<{width}}{GAP}", style="bold", end="")
        line.append(_one_line(value) or NOTHING, style=_STYLES.get(value, "not bold"))
        _write_line(sys.stdout, line)


def answer(
    form: Format, columns: Sequence[Column[T]], items: Sequence[T], whole: object = None
) -> None:
    """The items as a table, or in a structured form; `whole` in their place where that has more."""
    if form is Format.TABLE:
        table(columns, items)
    else:
        structured(items if whole is None else whole, form)


def structured(answer: object, form: Format) -> None:
    """A whole answer as JSON or YAML, in its plain form."""
    value = plain(answer)
    if form is Format.YAML:
        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
    else:
        spread = json.dumps(value, ensure_ascii=False, indent=2)
        sys.stdout.write(_NUMBERS.sub(_on_one_line, spread) + "\n")
    sys.stdout.flush()


_NUMBERS = re.compile(r"\[\n[-+.eE\d,\s]+\]")
"""A list of numbers as json spreads it. Nothing inside a string: there a line feed is escaped."""


def _on_one_line(numbers: re.Match[str]) -> str:
    return "[" + " ".join(numbers[0][1:-1].split()) + "]"


def json_line(value: Plain) -> None:
    """One JSON value on a line of its own, at once."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def text(piece: str, *, end: str = "\n") -> None:
    """Text as it is, at once; what would steer a terminal is shown instead of obeyed."""
    sys.stdout.write((harmless(piece) if sys.stdout.isatty() else piece) + end)
    sys.stdout.flush()


def console(stream: TextIO) -> Console:
    """For what moves on a terminal: bars, answers that grow. It leaves NO_COLOR in force."""
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def message(line: str) -> None:
    """Something for people, on stderr."""
    sys.stderr.write(_one_line(line) + "\n")
    sys.stderr.flush()


def error(failure: MeshError) -> None:
    """Exactly two lines."""
    lines = (("error: ", failure.message, "bold red"), ("hint: ", hint_of(failure), "bold"))
    for label, words, style in lines:
        line = Text(label, style=style, end="")
        line.append(_one_line(words), style="none")
        _write_line(sys.stderr, line)


def hint_of(failure: MeshError) -> str:
    """The error's own hint, or what helps with errors of its kind."""
    if failure.hint:
        return failure.hint
    for kind, hint in _HINTS:
        if isinstance(failure, kind):
            return hint
    return "`mesh logs` and the files under the home's logs/ say more"


_HINTS: tuple[tuple[type[MeshError], str], ...] = (
    (InvalidInput, "`mesh COMMAND --help` shows what is accepted"),
    (NotFound, "`mesh get` lists deployments, `mesh nodes` nodes"),
    (AlreadyExists, "choose another name"),
    (Cancelled, "give it more time with --timeout"),
    (Unavailable, "start a cell with `mesh up`, or name its controller with --controller"),
    (StorageError, "check the permissions and the free space of the state folder"),
    (ModelError, "check the source with `mesh pull SOURCE`"),
    (OutOfMemory, "give the node more --memory, or free some with `mesh delete`"),
)


def _write_line(stream: TextIO, line: Text) -> None:
    if stream.isatty():
        console(stream).print(line, soft_wrap=True)
    else:
        stream.write(line.plain + "\n")
    stream.flush()


def _one_line(value: str) -> str:
    return harmless(" ".join(value.split()) if any(mark in value for mark in "\n\r\t") else value)


def harmless(piece: str) -> str:
    """Control characters other than line feed and tab, spelled out: \\x1b for ESC."""
    return "".join(
        mark if mark.isprintable() or mark in "\n\t" or ord(mark) > 0x9F else f"\\x{ord(mark):02x}"
        for mark in piece
    )
