"""Replays ten minutes of each trace file against a live cell of this machine by `mesh replay`.

The rate is lowered to what two cores hold, by the tokens of the window; lengths only where many
rows are longer than the context, and single ones are cut to it. The files are read a second time,
by other code: whether all rows were planned, and whether what was sent are rows of the file.
The last line is one JSON object: `late_ms_p99` (of the file with the latest calls), `counts_equal`,
`lengths_equal`, `counts_difference` (the controller's against the client's), and `files`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cells import MESH, deployed, local_cell
from bench.demo_model import SOURCE
from bench.printing import errors_told, last_line, show_status, show_table
from bench.replay.checking import (
    Lengths,
    are_of,
    file_lengths,
    scaled,
    sent_lengths,
    trace_lengths,
)
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName
from mesh.domain.slo import Slo
from mesh.evaluation.replay.report import LATE_MS_MAX
from mesh_workloads.asked import Asked
from mesh_workloads.reading import read
from mesh_workloads.replay_plan import fitted
from mesh_workloads.trace import Trace, percentile

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
    ran = subprocess.run(
        [
            *(*MESH, "replay", str(path), "--controller", address, "-o", "json"),
            *("--duration", str(seconds), "--time-scale", str(time_scale)),
            *("--rate-scale", str(rate), "--tokens-scale", str(tokens)),
            *("--deployments", ",".join(DEPLOYMENTS), "--map", "popularity"),
            *("--record", str(record)),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds + RUN_S_MAX,
    )
    if not ran.stdout:
        raise MeshError(ran.stderr.strip())
    made = json.loads(ran.stdout)
    if made["counts_difference"] is None:
        raise MeshError("the controller's own counts are not to be had")
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


def report(found: list[Replayed]) -> None:
    headings = [name.upper() for name in Replayed.__dataclass_fields__]
    show_table(headings, [[str(value) for value in asdict(each).values()] for each in found])
    last_line(
        {
            "late_ms_p99": max(each.late_ms_p99 for each in found),
            "counts_equal": all(each.counts_equal for each in found),
            "lengths_equal": all(each.lengths_equal for each in found),
            "counts_difference": max(each.counts_difference for each in found),
            "files": [asdict(each) for each in found],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each (%(default)g)")
    parser.add_argument("--time-scale", type=float, default=1.0, help="0.2: five times as quickly")
    options = parser.parse_args()
    specs = [
        DeploymentSpec(
            name=DeploymentName(name), source=SOURCE, slo=SLO, context_tokens_max=CONTEXT_TOKENS
        )
        for name in DEPLOYMENTS
    ]
    found = []
    with errors_told(), tempfile.TemporaryDirectory() as folder:
        for path in options.traces:
            with local_cell() as cell:
                deployed(cell.address, specs)
                found.append(
                    replayed(cell.address, path, options.seconds, options.time_scale, Path(folder))
                )
        report(found)
    in_time = all(each.late_ms_p99 <= LATE_MS_MAX for each in found)
    equal = all(each.counts_equal and each.lengths_equal for each in found)
    sys.exit(0 if in_time and equal and not any(each.failed for each in found) else 1)


if __name__ == "__main__":
    main()
