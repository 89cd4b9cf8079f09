"""Reads a trace file of any known format, which its header tells, as a stream.

Rows become records by their format, `collecting` makes arrivals of those within the window. With a
sample, a first pass counts the requests of every function.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mesh.domain.errors import InvalidInput
from mesh_workloads.asked import ALL, Asked
from mesh_workloads.collecting import AsTheyAppear, Collecting
from mesh_workloads.formats import FORMATS, PLAIN_CSV, Format, Record
from mesh_workloads.source import Row, header, rows
from mesh_workloads.trace import FUNCTIONS_MAX, Trace


def recognise(path: Path, name: str | None = None) -> Format:
    """Raises InvalidInput, with the headers that are known, when the file has none of them, or not
    that of the format of this name.
    """
    named = [known for known in FORMATS if name in (None, known.name)]
    if not named:
        raise InvalidInput(
            f"there is no trace format {name!r}",
            hint="known are " + ", ".join(known.name for known in FORMATS),
        )
    columns = header(path)
    for known in named:
        if known.matches(columns):
            return known
    shown = ",".join(columns)
    raise InvalidInput(
        f"{path}:1: the columns {shown[:80]!r} are of "
        + ("no known trace format" if name is None else f"another format than {name}"),
        hint="known are " + "; ".join(f"{f.name} ({f.columns})" for f in named),
    )


def read(path: Path, asked: Asked = ALL, *, format_name: str | None = None) -> Trace:
    """The file's arrivals within the window asked for; times count from the window's start.

    With a sample the file is read twice. Raises InvalidInput for what no trace has, NotFound and
    StorageError for what cannot be read.
    """
    known = recognise(path, format_name)
    number: Callable[[str], int | None]
    if asked.sample is None:
        met = AsTheyAppear(path, keep=known is PLAIN_CSV)
        number, labels = met.number, met.labels
    else:
        taken = asked.sample.of(_requests(path, known, asked))
        number, labels = {label: i for i, label in enumerate(taken)}.get, lambda: taken
    collecting, order = Collecting(path, asked, number), _Order(known)
    for record in _records(path, known, order):
        collecting.add(record)
    return replace(collecting.trace(labels()), out_of_order=order.behind)


class _Order:
    """Watches the rows' times."""

    def __init__(self, known: Format) -> None:
        self._known = known
        self._last_s = -math.inf
        self.behind = 0
        """Rows so far that came after a later one."""

    def see(self, record: Record, row: Row) -> None:
        """Raises InvalidInput where the format is in order and this row is not."""
        if record.at_s >= self._last_s:
            self._last_s = record.at_s
            return
        if self._known.in_order:
            raise row.wrong(
                next(iter(row.cells)),
                f"is {self._last_s - record.at_s:.3f} s before the line before it",
                hint=f"files of the format {self._known.name} are in the order of their times: "
                "sort it by this column, or fetch it again",
            )
        self.behind += record.over_s == 0.0


def _records(path: Path, known: Format, order: _Order) -> Iterator[Record]:
    """With times from the first row's where the format says so."""
    first_s: float | None = None
    for row in rows(path):
        for record in known.records(row):
            order.see(record, row)
            if not known.from_first:
                yield record
                continue
            first_s = record.at_s if first_s is None else first_s
            yield _since(first_s, record, row)


def _since(first_s: float, record: Record, row: Row) -> Record:
    if record.at_s < first_s:
        column = next(iter(row.cells))
        raise row.wrong(column, f"is {first_s - record.at_s:.3f} s before the first row's")
    return replace(record, at_s=round(record.at_s - first_s, 6))


def _requests(path: Path, known: Format, asked: Asked) -> Counter[str]:
    """The requests of each function in the window; a minute that is partly in it counts as
    a whole.
    """
    counts: Counter[str] = Counter()
    for record in _records(path, known, _Order(known)):
        if asked.overlaps(record):
            counts[record.function] += record.count
            if len(counts) > FUNCTIONS_MAX:
                raise InvalidInput(f"{path} has more than {FUNCTIONS_MAX} functions")
    return counts
