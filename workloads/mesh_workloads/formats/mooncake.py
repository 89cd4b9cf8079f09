"""Mooncake: requests for Kimi with long contexts, one JSON object a line.

Files `mooncake_trace.jsonl`, `conversation_trace.jsonl`, `toolagent_trace.jsonl`,
`synthetic_trace.jsonl` (R. Qin et al., "Mooncake", FAST '25). Timestamps are milliseconds;
`hash_ids` are of the prompt's blocks of 512 tokens, and the same for the same beginning.
"""

import json
from collections.abc import Iterator

from mesh_workloads.formats.format import Format, Record
from mesh_workloads.source import Row
from mesh_workloads.trace import DURATION_S_MAX, TOKENS_MAX

_KEYS = ("timestamp", "input_length", "output_length")
FUNCTION = "mooncake"
ID_MAX = 1 << 39
"""The largest id of a block: in the simulator, each of its 512 tokens has a number of its own."""


def _records(row: Row) -> Iterator[Record]:
    for key in _KEYS:
        if key not in row.cells:
            raise row.wrong(key, "is missing")
    yield Record(
        at_s=row.number("timestamp", DURATION_S_MAX * 1000) / 1000,
        function=FUNCTION,
        input_tokens=row.integer("input_length", TOKENS_MAX),
        output_tokens=row.integer("output_length", TOKENS_MAX),
        blocks=_blocks(row),
    )


def _blocks(row: Row) -> tuple[int, ...]:
    if "hash_ids" not in row.cells:
        return ()
    try:
        ids = json.loads(row.cells["hash_ids"])
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= ID_MAX for i in ids):
        raise row.wrong("hash_ids", "must be a list of whole numbers, 0 or more")
    return tuple(ids)


FORMAT = Format(
    name="mooncake",
    columns='{"timestamp": …, "input_length": …, "output_length": …, "hash_ids": […]}',
    matches=lambda header: set(_KEYS) <= set(header),
    records=_records,
    from_first=False,
    in_order=True,
)
