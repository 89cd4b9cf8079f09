"""The record of a replay: the plain format with what came of each request; a trace again.

Rows come as requests end, so they are not in the order of their times. `t_s` and the lengths are
what was asked for, whatever came of it; functions keep their labels.
"""

from collections.abc import Iterator

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row
from mesh_workloads.trace import DURATION_S_MAX, TOKENS_MAX

COLUMNS = (
    *("t_s", "function", "input_tokens", "output_tokens"),
    *("deployment", "late_ms", "end", "tokens", "ttft_s", "tpot_s", "whole_s", "grace_s"),
    *("met", "met_in_the_mean"),
)
"""`end` is how it ended: stop, length, the reason of a refusal, failed, or cancelled, which is
left when the replay was stopped. `grace_s` is by how much it was told to be late, 0 in time. `met`
(1 or 0) is with every token in time or as late as told, `met_in_the_mean` with TTFT and mean TPOT.
"""


def _records(row: Row) -> Iterator[Record]:
    yield Record(
        at_s=row.number("t_s", DURATION_S_MAX),
        function=row.text("function"),
        input_tokens=row.integer("input_tokens", TOKENS_MAX),
        output_tokens=row.integer("output_tokens", TOKENS_MAX),
    )


FORMAT = Format(
    name="replay",
    columns=",".join(COLUMNS),
    matches=lambda header: header == COLUMNS,
    records=_records,
    from_first=False,
    in_order=False,
)
