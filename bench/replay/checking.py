"""A trace file read a second time, by nothing of mesh's readers, and what was sent against it.

The window's rows must all be in the plan before it is thinned; what was sent must be rows of them,
scaled and cut as the options say. Before: the files. After: the benchmark's figures.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from mesh_workloads.replay_plan import fitted
from mesh_workloads.trace import Trace

Lengths = tuple[int, int]
"""Tokens of a prompt and of its answer."""
_TIMES = ("t_s", "timestamp", "Timestamp", "TIMESTAMP")
_INPUTS = ("input_tokens", "input_length", "Request tokens", "ContextTokens")
_OUTPUTS = ("output_tokens", "output_length", "Response tokens", "GeneratedTokens")


def file_lengths(path: Path, seconds: float) -> Counter[Lengths]:
    """The lengths in the file's first so many seconds, for formats with a row for each request and
    lengths.
    """
    with path.open(encoding="utf-8") as file:
        jsonl = path.suffix == ".jsonl"
        rows = [json.loads(line) for line in file] if jsonl else list(csv.DictReader(file))
    at, asked, answered = (
        next(name for name in names if name in rows[0]) for names in (_TIMES, _INPUTS, _OUTPUTS)
    )
    # A plain file's times and Mooncake's count from its own zero, all others' from the first row.
    zero_s = 0.0 if at in ("t_s", "timestamp") else _seconds(rows[0][at], at)
    return Counter(
        (int(row[asked]), int(row[answered]))
        for row in rows
        if _seconds(row[at], at) - zero_s < seconds and int(row[asked]) and int(row[answered])
    )


def _seconds(value: str | float, column: str) -> float:
    if column == "TIMESTAMP":
        return datetime.fromisoformat(str(value)).timestamp()
    return float(value) / (1000 if column == "timestamp" else 1)


def trace_lengths(trace: Trace) -> Counter[Lengths]:
    return Counter((a.input_tokens, a.output_tokens) for a in trace.arrivals)


def sent_lengths(record: Path) -> Counter[Lengths]:
    """The lengths in a replay's record."""
    with record.open(encoding="utf-8") as file:
        return Counter(
            (int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)
        )


def scaled(lengths: Counter[Lengths], scale: float) -> Iterator[Lengths]:
    """The lengths times `scale`, rounded, 1 at least."""
    for asked, answered in lengths.elements():
        yield max(1, round(asked * scale)), max(1, round(answered * scale))


def are_of(sent: Counter[Lengths], lengths: Iterable[Lengths], context_tokens: int) -> bool:
    """Whether each was sent as often as it is there at most, cut to the context."""
    there = Counter(fitted(*each, context_tokens) for each in lengths)
    return all(count <= there[each] for each, count in sent.items())
