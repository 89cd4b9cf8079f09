"""Calls by HTTP and gRPC and model files that are wrong, odd or damaged, against a cell.

Calls follow the schema that HTTP serves and the descriptors of gRPC. Files are configurations,
tokenizers, templates, GGUF metadata and safetensors headers.

Two deployments of the demo model, one of which embeds, with a context so short that each answer
ends soon. A front before the cell is called by gRPC, too. Afterwards the processes must be those
that were started, with no request, KV block or descriptor held. The last line is one JSON object
(`cases`, `undocumented`, `hangs` of all together, `leaks`); exit code 1 when any but the first is
not 0.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Literal

import psutil

from bench.cells import deployed, local_cell
from bench.demo_model import SOURCE, stored_model
from bench.front import front_before
from bench.fuzz_http import fuzz_http
from bench.fuzz_importing import fuzz_files
from bench.fuzz_protocols import Findings, fuzz_grpc, methods
from bench.harness import Report, Table
from bench.soak import FDS_GROWTH_MAX, leftovers
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.model import Task
from mesh.front.server import FRONT_SERVICES
from mesh.wire.client import MeshClient

NAME, EMBEDS = DeploymentName("fuzz"), DeploymentName("embeds")
CONTEXT_TOKENS = 64
WARM_UP_CASES = 50


def fuzzed(
    cell: LocalCell, front: str, cases: int, seeded: int, only: Collection[str]
) -> dict[str, Findings]:
    names, asked = [NAME, EMBEDS], [m for m in methods() if not only or m.name in only]
    of_front = [m for m in asked if m.containing_service.full_name in FRONT_SERVICES]
    found = {
        "gRPC": fuzz_grpc(cell.address, names, cases=cases, seeded=seeded, asked=asked),
        "gRPC, a front": fuzz_grpc(front, names, cases=cases, seeded=seeded, asked=of_front),
    }
    if not only:
        url = f"http://{cell.http_address}"
        found["HTTP"] = fuzz_http(url, [NAME], [EMBEDS], cases_max=cases, seeded=seeded)
        found["files"] = fuzz_files(cell.address, cases_max=cases, seeded=seeded)
    return found


def fuzz(
    cases: int, seeded: int, only: Collection[str] = ()
) -> tuple[dict[str, Findings], list[str]]:
    """The findings of both protocols and of files, and what is left or lost afterwards."""
    with ExitStack() as opened:
        cell = opened.enter_context(local_cell(http="127.0.0.1:0"))
        spec = DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS)
        deployed(cell.address, [spec, replace(spec, name=EMBEDS, task=Task.EMBED)])
        processes = {child.name: psutil.Process(child.process.pid) for child in cell.children}
        front, processes["the front"] = opened.enter_context(front_before(cell, NAME))
        fuzzed(cell, front, WARM_UP_CASES, seeded + 1, only)
        fds = {name: process.num_fds() for name, process in processes.items()}
        findings = fuzzed(cell, front, cases, seeded, only)
        with MeshClient(cell.address) as client:
            leaks = leftovers(client)
        for name, process in processes.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                leaks.append(f"{name} died")
            elif (more := process.num_fds() - fds[name]) > FDS_GROWTH_MAX:
                leaks.append(f"{name}: {more} more file descriptors")
    return findings, leaks


def run(
    *,
    cases: Annotated[int, "for each protocol, by gRPC a front's, too, and for files"] = 10_000,
    seed: int = 1,
    only: Annotated[
        tuple[Literal["Invoke", "InvokeMany", "Connect"], ...], "these methods of gRPC alone"
    ] = (),
) -> Report:
    stored_model()
    findings, leaks = fuzz(cases, seed, only)
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
