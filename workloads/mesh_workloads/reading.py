"""Reads a trace file of any known format, which its header tells, as a stream.

Rows become records by their format, `collecting` makes arrivals of those within the window. With a
sample, a first pass counts the requests of every function.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mesh.domain.errors import InvalidInput
from mesh_workloads.asked import ALL, Asked
from mesh_workloads.collecting import AsTheyAppear, Collecting
from mesh_workloads.formats import (
    azure_functions_2019,
    azure_functions_2021,
    azure_llm,
    burstgpt,
    mooncake,
    plain_csv,
)
from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row, header, rows
from mesh_workloads.trace import FUNCTIONS_MAX, Trace

FORMATS = (
    plain_csv.FORMAT,
    azure_functions_2019.FORMAT,
    azure_functions_2021.FORMAT,
    azure_llm.FORMAT,
    burstgpt.FORMAT,
    mooncake.FORMAT,
)


def recognise(path: Path) -> Format:
    """Raises InvalidInput, with the headers that are known, when the file has none of them."""
    columns = header(path)
    for known in FORMATS:
        if known.matches(columns):
            return known
    shown = ",".join(columns)
    raise InvalidInput(
        f"{path}:1: the columns {shown[:80]!r} are of no known trace format",
        hint="known are " + "; ".join(f"{f.name} ({f.columns})" for f in FORMATS),
    )


def read(path: Path, asked: Asked = ALL) -> Trace:
    """The file's arrivals within the window asked for; times count from the window's start.

    With a sample the file is read twice. Raises InvalidInput for what no trace has, NotFound and
    StorageError for what cannot be read.
    """
    known = recognise(path)
    if asked.sample is None:
        met = AsTheyAppear(path, keep=known is plain_csv.FORMAT)
        return _collect(path, known, Collecting(path, asked, met.number)).trace(met.labels())
    taken = asked.sample.of(_requests(path, known, asked))
    numbers = {label: number for number, label in enumerate(taken)}
    return _collect(path, known, Collecting(path, asked, numbers.get)).trace(taken)


def _collect(path: Path, known: Format, collecting: Collecting) -> Collecting:
    for record in _records(path, known):
        collecting.add(record)
    return collecting


def _records(path: Path, known: Format) -> Iterator[Record]:
    """With times from the first row's where the format says so."""
    first_s: float | None = None
    for row in rows(path):
        for record in known.records(row):
            if not known.from_first:
                yield record
                continue
            first_s = record.at_s if first_s is None else first_s
            yield _since(first_s, record, row)


def _since(first_s: float, record: Record, row: Row) -> Record:
    if record.at_s < first_s:
        column = next(iter(row.cells))
        raise row.wrong(column, f"is {first_s - record.at_s:.3f} s before the first row's")
    return Record(
        at_s=round(record.at_s - first_s, 6),
        function=record.function,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
    )


def _requests(path: Path, known: Format, asked: Asked) -> Counter[str]:
    """Of each function in the window; a minute that is partly in it counts as a whole."""
    counts: Counter[str] = Counter()
    for record in _records(path, known):
        if asked.overlaps(record):
            counts[record.function] += record.count
            if len(counts) > FUNCTIONS_MAX:
                raise InvalidInput(f"{path} has more than {FUNCTIONS_MAX} functions")
    return counts
