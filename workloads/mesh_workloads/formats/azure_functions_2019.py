"""Azure Functions 2019: invocations of every function, counted minute by minute.

Files `invocations_per_function_md.anon.d01.csv` to `d14`, a day each (M. Shahrad et al.,
"Serverless in the Wild", ATC '20; CC-BY). When within its minute an
invocation comes is not recorded, nor are any lengths.
"""

from collections.abc import Iterator

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row

_NAMED = ("HashOwner", "HashApp", "HashFunction", "Trigger")
MINUTES_MAX = 1440
MINUTE_COUNT_MAX = 10_000_000
"""Invocations of one function in one minute; the busiest of the trace has about 300,000."""


def _matches(header: tuple[str, ...]) -> bool:
    minutes = header[len(_NAMED) :]
    return (
        header[: len(_NAMED)] == _NAMED
        and 1 <= len(minutes) <= MINUTES_MAX
        and minutes == tuple(str(minute + 1) for minute in range(len(minutes)))
    )


def _records(row: Row) -> Iterator[Record]:
    label = f"{row.text('HashApp')}/{row.text('HashFunction')}"
    for minute in range(len(row.cells) - len(_NAMED)):
        count = row.integer(str(minute + 1), MINUTE_COUNT_MAX)
        if count:
            yield Record(at_s=60.0 * minute, over_s=60.0, function=label, count=count)


FORMAT = Format(
    name="azure-functions-2019",
    columns="HashOwner,HashApp,HashFunction,Trigger,1,2,…,1440",
    matches=_matches,
    records=_records,
    from_first=False,
    in_order=False,
)
