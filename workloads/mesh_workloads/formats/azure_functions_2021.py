"""Azure Functions 2021: every invocation, with its end and duration in seconds.

File `AzureFunctionsInvocationTraceForTwoWeeksJan2021.txt` (Y. Zhang et al., "Faster and Cheaper
Serverless Computing on Harvested Resources", SOSP '21; CC-BY). A request arrives when its
invocation begins, at the end less the duration; one that began before the trace is none.
"""

from collections.abc import Iterator

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row
from mesh_workloads.trace import DURATION_S_MAX

_COLUMNS = ("app", "func", "end_timestamp", "duration")


def _records(row: Row) -> Iterator[Record]:
    end_s = row.number("end_timestamp", DURATION_S_MAX)
    start_s = end_s - row.number("duration", DURATION_S_MAX)
    label = f"{row.text('app')}/{row.text('func')}"
    if start_s >= 0:
        yield Record(at_s=round(start_s, 6), function=label)


FORMAT = Format(
    name="azure-functions-2021",
    columns=",".join(_COLUMNS),
    matches=lambda header: header == _COLUMNS,
    records=_records,
    from_first=False,
    in_order=False,
)
