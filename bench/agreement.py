"""Whether locust and `mesh replay` tell the same of the same trace, and the controller with them.

Both replay it against one live cell of this machine, with all deployments loaded, in turn and in
the order A B B A …; what came of all rounds of each is compared. With --http locust calls by
OpenAI's protocol. The last line is one JSON object: `attainment_difference` (of both shares the
larger one), `errors_difference` and `ttft_p95_difference` (as a share of the larger one) between
the senders; the worst of either's against the controller: `counts_difference` (of any run), and
`metrics_attainment_difference` and `metrics_errors_difference` (of all runs) by what `/metrics`
says. Exit code 1 when a run failed, a sender and the controller differ by more than 1 %, or the
senders by more than 2 %.
"""

import csv
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import requests
from prometheus_client.parser import text_string_to_metric_families

from bench.cells import MESH, deployed, local_cell, replay_said, wait_calm
from bench.demo_model import SOURCE, stored_model
from bench.harness import Report, Table, in_turn
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from mesh.evaluation.replay.cell import COUNTS_DIFFERENCE_MAX
from mesh.report.distribution import Distribution
from mesh.wire.client import MeshClient
from mesh_load import LOCUSTFILE

SECONDS, ROUNDS = 60.0, 4
CALLS_PER_S, INPUT_TOKENS, OUTPUT_TOKENS = 2.0, 160, 8
"""Evenly, so that none meets another: where calls queue, chance makes more of TTFT than a sender.
"""
TOKENS_SCALE = 0.1
"""The generated lengths, which are those of a published trace, are scaled by this."""
DEPLOYMENTS = 3
SLO = Slo(ttft_s=2.0, ttft_tokens_per_s=256.0, tpot_s=0.2)
SENDERS_DIFFERENCE_MAX = 0.02
RUN_S_MAX = 300.0
"""Beside what the trace lasts for."""
SCRAPE_S_MAX = 10.0
_MET, _REFUSED = "mesh_requests_met_slo_total", "mesh_requests_refused_total"
_ENDED = "vllm:request_success_total"
_SERVED = frozenset((FinishReason.STOP.value, FinishReason.LENGTH.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """Calls, as `/metrics` counts them."""

    calls: int
    served: int
    met: int

    def since(self, before: "Metered") -> "Metered":
        return Metered(
            calls=self.calls - before.calls,
            served=self.served - before.served,
            met=self.met - before.met,
        )


def metered(exposition: str) -> Metered:
    found = {"calls": 0.0, "served": 0.0, "met": 0.0}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in (_ENDED, _REFUSED):
                found["calls"] += sample.value
                if sample.labels.get("finished_reason") in _SERVED:
                    found["served"] += sample.value
            elif sample.name == _MET:
                found["met"] += sample.value
    return Metered(**{name: int(value) for name, value in found.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """By one sender, of all of its rounds."""

    calls: int
    attainment: float
    attainment_in_the_mean: float
    errors: float
    """The share of all calls that failed."""
    ttft_s_p95: float
    """The median round's: a neighbour of the machine that takes part in one decides nothing."""
    counts_difference: float
    metrics_attainment_difference: float
    metrics_errors_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    rows: tuple[dict[str, str], ...]
    """The rows of its record."""
    counts_difference: float
    metered: Metered
    """What the controller counted meanwhile."""


def told(rounds: Sequence[Round]) -> Told:
    rows = [row for each in rounds for row in each.rows]
    seen = [each.metered for each in rounds]
    seen_calls = max(sum(each.calls for each in seen), 1)
    in_the_mean = _share(rows, "met_in_the_mean", "1")
    served = sum(row["end"] in _SERVED for row in rows) / max(len(rows), 1)
    return Told(
        calls=len(rows),
        attainment=_share(rows, "met", "1"),
        attainment_in_the_mean=in_the_mean,
        errors=_share(rows, "end", FinishReason.FAILED),
        ttft_s_p95=median(map(_ttft_s_p95, rounds)),
        counts_difference=max(each.counts_difference for each in rounds),
        metrics_attainment_difference=abs(in_the_mean - sum(m.met for m in seen) / seen_calls),
        metrics_errors_difference=abs(served - sum(m.served for m in seen) / seen_calls),
    )


def _ttft_s_p95(of: Round) -> float:
    ttft = Distribution.of(float(row["ttft_s"]) for row in of.rows if row["ttft_s"])
    return ttft.at(95) or 0.0


def _share(rows: Sequence[dict[str, str]], column: str, value: str) -> float:
    return sum(row[column] == value for row in rows) / max(len(rows), 1)


OF_THE_CONTROLLER = (
    "counts_difference",
    "metrics_attainment_difference",
    "metrics_errors_difference",
)


def differences(one: Told, other: Told) -> dict[str, float]:
    longer_s = max(one.ttft_s_p95, other.ttft_s_p95)
    found = {
        "attainment_difference": max(
            abs(one.attainment - other.attainment),
            abs(one.attainment_in_the_mean - other.attainment_in_the_mean),
        ),
        "errors_difference": abs(one.errors - other.errors),
        "ttft_p95_difference": abs(one.ttft_s_p95 - other.ttft_s_p95) / longer_s
        if longer_s
        else 0.0,
        **{name: max(getattr(one, name), getattr(other, name)) for name in OF_THE_CONTROLLER},
    }
    return {name: round(value, 4) for name, value in found.items()}


def targets(different: Mapping[str, float]) -> dict[str, str]:
    return {
        name: f"<= {COUNTS_DIFFERENCE_MAX if name in OF_THE_CONTROLLER else SENDERS_DIFFERENCE_MAX}"
        for name in different
    }


def replayed(
    sender: str, cell: LocalCell, what: Sequence[str], seconds: float, http: bool
) -> Round:
    """One replay by `mesh replay` or by locust. Raises MeshError when it fails."""
    before = _scraped(cell)
    with tempfile.TemporaryDirectory() as place:
        record, figures = Path(place) / "record.csv", Path(place) / "figures"
        if sender == "locust":
            command = [
                *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)),
                *("--host", cell.address),
                *(("--http", str(cell.http_address)) if http else ()),
                *("--headless", "--only-summary", "--json-file", str(figures), *what),
            ]
        else:
            command = [*MESH, "replay", "--controller", cell.address, "-o", "json", *what]
        slo = Path(f"{figures}_slo.json") if sender == "locust" else None
        made = replay_said([*command, "--record", str(record)], seconds + RUN_S_MAX, slo)
        with record.open() as file:
            rows = tuple(csv.DictReader(file))
    return Round(
        rows=rows,
        counts_difference=made["counts_difference"],
        metered=_scraped(cell).since(before),
    )


def _scraped(cell: LocalCell) -> Metered:
    answer = requests.get(f"http://{cell.http_address}/metrics", timeout=SCRAPE_S_MAX)
    return metered(answer.text)


def even_trace(calls_per_s: float, seconds: float, deployments: int) -> str:
    rows = [
        f"{n / calls_per_s:.3f},{n % deployments},{INPUT_TOKENS},{OUTPUT_TOKENS}"
        for n in range(int(calls_per_s * seconds))
    ]
    return "\n".join(["t_s,function,input_tokens,output_tokens", *rows]) + "\n"


def compare(
    trace: Path | None,
    specs: Sequence[DeploymentSpec],
    *,
    generate: float | None,
    seconds: float,
    rounds: int,
    http: bool,
) -> dict[str, Told]:
    """By sender; without a trace, of generated calls to deployments that come and go. Raises
    MeshError.
    """
    what = ["--duration", str(seconds), "--map", "popularity"]
    named = {"mesh replay": [str(trace)], "locust": ["--trace", str(trace)]}
    if trace is None:
        what += ["--generate", str(generate), "--tokens-scale", str(TOKENS_SCALE)]
        named = {"mesh replay": [], "locust": []}
    found: dict[str, list[Round]] = {"mesh replay": [], "locust": []}
    with local_cell(http="127.0.0.1:0") as cell:
        if trace is None:
            with MeshClient(cell.address) as client:
                for spec in specs:
                    client.deploy(spec)
        else:
            deployed(cell.address, specs)
            wait_calm(cell)
        for _, sender, trace_of in in_turn(named, rounds):
            found[sender].append(replayed(sender, cell, [*trace_of, *what], seconds, http))
    return {sender: told(each) for sender, each in found.items()}


def run(
    *,
    trace: Path | None = None,
    generate: Annotated[
        float | None, "in place of a trace so many calls a second, to deployments that go"
    ] = None,
    http: Annotated[bool, "locust calls by OpenAI's protocol"] = False,
    deployments: int = DEPLOYMENTS,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    rate: Annotated[float, "calls a second, without a trace"] = CALLS_PER_S,
) -> Report:
    stored_model()
    specs = [
        DeploymentSpec(name=DeploymentName(f"agree-{n:02}"), source=SOURCE, slo=SLO)
        for n in range(deployments)
    ]
    with tempfile.TemporaryDirectory() as place:
        if trace is None and generate is None:
            trace = Path(place) / "trace.csv"
            trace.write_text(even_trace(rate, seconds, deployments))
        found = compare(trace, specs, generate=generate, seconds=seconds, rounds=rounds, http=http)
    different = differences(*found.values())
    met = targets(different)
    if trace is None:
        del met["ttft_p95_difference"]  # where calls queue, chance makes more of it than a sender
    rows = [
        [name.upper(), *(f"{getattr(each, name):.4g}" for each in found.values())]
        for name in Told.__dataclass_fields__
    ]
    headings = ["FIGURE", *(sender.upper() for sender in found)]
    return Report(
        figures={"calls": sum(each.calls for each in found.values()), **different},
        shown=[Table(headings=headings, rows=rows)],
        targets=met,
    )
