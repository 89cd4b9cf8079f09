"""The plain format: `t_s,function,input_tokens,output_tokens`, which mesh also writes.

Functions are numbers from 0 and keep them.
"""

from collections.abc import Iterator
from typing import TextIO

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row
from mesh_workloads.trace import DURATION_S_MAX, FUNCTIONS_MAX, TOKENS_MAX, Trace

_COLUMNS = ("t_s", "function", "input_tokens", "output_tokens")


def write(trace: Trace, file: TextIO) -> None:
    """The trace's arrivals; reading them back gives equal ones."""
    file.write(",".join(_COLUMNS) + "\n")
    for a in trace.arrivals:
        file.write(f"{a.t_s!r},{a.function},{a.input_tokens},{a.output_tokens}\n")


def _records(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=row.number("t_s", DURATION_S_MAX),
        function=str(row.integer("function", FUNCTIONS_MAX - 1)),
        input_tokens=row.integer("input_tokens", TOKENS_MAX),
        output_tokens=row.integer("output_tokens", TOKENS_MAX),
    )


FORMAT = Format(
    name="csv",
    columns=",".join(_COLUMNS),
    matches=lambda header: header == _COLUMNS,
    records=_records,
    from_first=False,
    in_order=True,
)
