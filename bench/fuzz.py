"""Calls by HTTP and gRPC and model files that are wrong, odd or damaged, against a cell.

Calls follow the schema that HTTP serves and the descriptors of gRPC. Files are configurations,
tokenizers, templates, GGUF metadata and safetensors headers.

Two deployments of the demo model, one of which embeds, with a context so short that each answer
ends soon. Afterwards the cell's processes must be those that were started, with no request, KV
block or descriptor held. The last line is one JSON object (`cases`, `undocumented`, `hangs` of all
together, `leaks`); exit code 1 when any but the first is not 0.
"""

from dataclasses import replace
from typing import Annotated

import psutil

from bench.cells import deployed, local_cell
from bench.demo_model import SOURCE, stored_model
from bench.fuzz_http import fuzz_http
from bench.fuzz_importing import fuzz_files
from bench.fuzz_protocols import Findings, fuzz_grpc
from bench.harness import Report, Table
from bench.soak import FDS_GROWTH_MAX, leftovers
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.model import Task
from mesh.wire.client import MeshClient

NAME, EMBEDS = DeploymentName("fuzz"), DeploymentName("embeds")
CONTEXT_TOKENS = 64
WARM_UP_CASES = 50


def fuzzed(cell: LocalCell, cases: int, seeded: int) -> dict[str, Findings]:
    url = f"http://{cell.http_address}"
    return {
        "HTTP": fuzz_http(url, [NAME], [EMBEDS], cases_max=cases, seeded=seeded),
        "gRPC": fuzz_grpc(cell.address, [NAME, EMBEDS], cases=cases, seeded=seeded),
        "files": fuzz_files(cell.address, cases_max=cases, seeded=seeded),
    }


def fuzz(cases: int, seeded: int) -> tuple[dict[str, Findings], list[str]]:
    """The findings of both protocols and of files, and what is left or lost afterwards."""
    with local_cell(http="127.0.0.1:0") as cell:
        spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS)
        deployed(cell.address, [spec, replace(spec, name=EMBEDS, task=Task.EMBED)])
        processes = {child.name: psutil.Process(child.process.pid) for child in cell.children}
        fuzzed(cell, WARM_UP_CASES, seeded + 1)
        fds = {name: process.num_fds() for name, process in processes.items()}
        findings = fuzzed(cell, cases, seeded)
        with MeshClient(cell.address) as client:
            leaks = leftovers(client)
        for name, process in processes.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                leaks.append(f"{name} died")
            elif (more := process.num_fds() - fds[name]) > FDS_GROWTH_MAX:
                leaks.append(f"{name}: {more} more file descriptors")
    return findings, leaks


def run(
    *, cases: Annotated[int, "for each protocol, and for files"] = 10_000, seed: int = 1
) -> Report:
    stored_model()
    findings, leaks = fuzz(cases, seed)
    rows = [(of, str(f.cases), str(f.undocumented), str(f.hangs)) for of, f in findings.items()]
    figures = {
        what: sum(getattr(f, what) for f in findings.values())
        for what in ("cases", "undocumented", "hangs")
    }
    outcomes = {of: dict(sorted(f.outcomes.items())) for of, f in findings.items()}
    return Report(
        figures={**figures, "leaks": leaks, "seed": seed, "outcomes": outcomes},
        shown=(
            Table(headings=("by", "cases", "undocumented", "hangs"), rows=rows),
            *(line for f in findings.values() for line in f.shown),
            *leaks,
        ),
        targets={"undocumented": "== 0", "hangs": "== 0", "nothing leaked": not leaks},
    )
