"""Replays ten minutes of each trace file against a live cell of this machine by `mesh replay`.

The rate is lowered to what two cores hold, by the tokens of the window; lengths only where many
rows are longer than the context, and single ones are cut to it. The files are read a second time,
by other code: whether all rows were planned, and whether what was sent are rows of the file.
The last line is one JSON object: `late_ms_p99` (of the file with the latest calls), `counts_equal`,
`lengths_equal`, `counts_difference` (the controller's against the client's), and `files`.
"""

import csv
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from bench.cells import MESH, deployed, local_cell, replay_said
from bench.demo_model import SOURCE
from bench.harness import Report, Table, show_status
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.evaluation.replay.report import LATE_MS_MAX
from mesh_workloads.asked import Asked
from mesh_workloads.reading import read
from mesh_workloads.replay_plan import fitted
from mesh_workloads.trace import Trace, percentile

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


SECONDS = 600.0
CONTEXT_TOKENS = 2048
DEPLOYMENTS = tuple(f"load-{n}" for n in range(4))
SLO = Slo(ttft_s=8.0, ttft_tokens_per_s=128.0, tpot_s=0.4)
INPUT_TOKENS_PER_S, OUTPUT_TOKENS_PER_S = 400.0, 200.0
"""About what two cores compute of the demo model."""
LOAD = 0.8
"""The offered load, as a share of that."""
RUN_S_MAX = 300.0
"""Beside what the trace lasts for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    file: str
    rows: int
    """How many rows the window has."""
    rate_scale: float
    tokens_scale: float
    sent: int
    cut: int
    """Rows that even so no context holds whole."""
    finished: int
    refused: int
    failed: int
    late_ms_p99: float
    counts_equal: bool
    lengths_equal: bool
    counts_difference: float


def tokens_scale(trace: Trace) -> float:
    """1 where 19 of 20 rows fit into the context; else so that they do."""
    whole = sorted(a.input_tokens + a.output_tokens for a in trace.arrivals)
    return round(min(1.0, CONTEXT_TOKENS / percentile(whole, 95)), 3)


def rate_scale(lengths: Iterable[Lengths], seconds: float) -> float:
    """At most 1: with it they ask for LOAD of what the cores hold."""
    cut = [fitted(*each, CONTEXT_TOKENS) for each in lengths]
    cost_s = sum(i / INPUT_TOKENS_PER_S + o / OUTPUT_TOKENS_PER_S for i, o in cut)
    return round(min(1.0, LOAD * seconds / cost_s), 4)


def replayed(address: str, path: Path, seconds: float, time_scale: float, folder: Path) -> Replayed:
    """Raises MeshError when `mesh replay` does."""
    trace = read(path, Asked(duration_s=seconds))
    lengths, tokens = file_lengths(path, seconds), tokens_scale(trace)
    shorter = list(scaled(lengths, tokens))
    rate, record = rate_scale(shorter, seconds * time_scale), folder / f"{path.stem}.csv"
    show_status(f"{path.name}: {seconds:g} s in {seconds * time_scale:g} s, {rate:g} of its calls")
    made = replay_said(
        [
            *(*MESH, "replay", str(path), "--controller", address, "-o", "json"),
            *("--duration", str(seconds), "--time-scale", str(time_scale)),
            *("--rate-scale", str(rate), "--tokens-scale", str(tokens)),
            *("--deployments", ",".join(DEPLOYMENTS), "--map", "popularity"),
            *("--record", str(record)),
        ],
        seconds + RUN_S_MAX,
    )
    whole, sent = made["numbers"][0], sent_lengths(record)
    return Replayed(
        file=path.name,
        rows=lengths.total(),
        rate_scale=rate,
        tokens_scale=tokens,
        sent=sent.total(),
        cut=sum(sum(each) > CONTEXT_TOKENS for each in shorter),
        finished=whole["finished"],
        refused=sum(whole["refused"].values()),
        failed=sum(whole["failed"].values()),
        late_ms_p99=round(whole["late_ms_p99"], 2),
        counts_equal=lengths.total() == len(trace.arrivals) and sent.total() == made["planned"],
        lengths_equal=lengths == trace_lengths(trace) and are_of(sent, shorter, CONTEXT_TOKENS),
        counts_difference=made["counts_difference"],
    )


def report(found: list[Replayed]) -> Report:
    headings = [name.upper() for name in Replayed.__dataclass_fields__]
    rows = [[str(value) for value in asdict(each).values()] for each in found]
    return Report(
        figures={
            "late_ms_p99": max(each.late_ms_p99 for each in found),
            "counts_equal": all(each.counts_equal for each in found),
            "lengths_equal": all(each.lengths_equal for each in found),
            "counts_difference": max(each.counts_difference for each in found),
            "files": [asdict(each) for each in found],
        },
        shown=[Table(headings=headings, rows=rows)],
        targets={
            "late_ms_p99": f"<= {LATE_MS_MAX}",
            "counts_equal": "== 1",
            "lengths_equal": "== 1",
            "no call failed": not any(each.failed for each in found),
        },
    )


def run(
    *traces: Path,
    seconds: Annotated[float, "seconds of each trace"] = SECONDS,
    time_scale: Annotated[float, "0.2 replays five times as quickly"] = 1.0,
) -> Report:
    specs = [
        DeploymentSpec(
            name=DeploymentName(name), source=SOURCE, slo=SLO, context_tokens_max=CONTEXT_TOKENS
        )
        for name in DEPLOYMENTS
    ]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for path in traces:
            with local_cell() as cell:
                deployed(cell.address, specs)
                found.append(replayed(cell.address, path, seconds, time_scale, Path(folder)))
    return report(found)
