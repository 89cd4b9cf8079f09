"""Mooncake: requests for Kimi with long contexts, one JSON object a line.

Files `mooncake_trace.jsonl`, `conversation_trace.jsonl`, `toolagent_trace.jsonl`,
`synthetic_trace.jsonl` (R. Qin et al., "Mooncake", FAST '25). Timestamps are milliseconds. The
hashes of the prompts' blocks (`hash_ids`) are not read: functions do not share prefixes here.
"""

from collections.abc import Iterator

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row
from mesh_workloads.trace import DURATION_S_MAX, TOKENS_MAX

_KEYS = ("timestamp", "input_length", "output_length")
FUNCTION = "mooncake"


def _records(row: Row) -> Iterator[Record]:
    for key in _KEYS:
        if key not in row.cells:
            raise row.wrong(key, "is missing")
    yield Record(
        at_s=row.number("timestamp", DURATION_S_MAX * 1000) / 1000,
        function=FUNCTION,
        input_tokens=row.integer("input_length", TOKENS_MAX),
        output_tokens=row.integer("output_length", TOKENS_MAX),
    )


FORMAT = Format(
    name="mooncake",
    columns='{"timestamp": …, "input_length": …, "output_length": …, "hash_ids": […]}',
    matches=lambda header: set(_KEYS) <= set(header),
    records=_records,
    from_first=False,
    in_order=True,
)
