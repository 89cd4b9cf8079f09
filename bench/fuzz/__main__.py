"""Fuzzes a cell by both protocols, the schema that HTTP serves and the descriptors of gRPC, and by
the files of models: configurations, tokenizers, templates, GGUF metadata, safetensors headers.

One deployment of the demo model, with a context so short that each answer ends soon. Afterwards the
cell's processes must be those that were started, with no request, KV block or descriptor held. The
last line is one JSON object (`cases`, `undocumented`, `hangs` of all together, `leaks`); exit code
1 when any but the first is not 0.
"""

import argparse

import psutil

from bench.cells import deployed, local_cell
from bench.demo_model import SOURCE, stored_model
from bench.fuzz.findings import Findings
from bench.fuzz.http import fuzz_http
from bench.fuzz.importing import fuzz_files
from bench.fuzz.rpc import fuzz_grpc
from bench.printing import errors_told, exit_by, last_line, show_table
from bench.soak.watching import FDS_GROWTH_MAX, leftovers
from mesh.cli.cell import LocalCell
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient

NAME = DeploymentName("fuzz")
CONTEXT_TOKENS = 64
WARM_UP_CASES = 50
CASES = 10_000


def fuzzed(cell: LocalCell, cases: int, seeded: int) -> dict[str, Findings]:
    url = f"http://{cell.http_address}"
    return {
        "HTTP": fuzz_http(url, NAME, cases=cases, seeded=seeded),
        "gRPC": fuzz_grpc(cell.address, [NAME], cases=cases, seeded=seeded),
        "files": fuzz_files(cell.address, cases_max=cases, seeded=seeded),
    }


def fuzz(cases: int, seeded: int) -> tuple[dict[str, Findings], list[str]]:
    """The findings of both protocols and of files, and what is left or lost afterwards."""
    with local_cell(http="127.0.0.1:0") as cell:
        deployed(
            cell.address,
            [DeploymentSpec(name=NAME, source=SOURCE, context_tokens_max=CONTEXT_TOKENS)],
        )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES, help="of each protocol, and of files")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with errors_told():
        stored_model()
        findings, leaks = fuzz(options.cases, options.seed)
        rows = [(of, str(f.cases), str(f.undocumented), str(f.hangs)) for of, f in findings.items()]
        show_table(("by", "cases", "undocumented", "hangs"), rows)
        for line in [*(line for f in findings.values() for line in f.shown), *leaks]:
            print(line)
        figures = {
            what: sum(getattr(f, what) for f in findings.values())
            for what in ("cases", "undocumented", "hangs")
        }
        outcomes = {of: dict(sorted(f.outcomes.items())) for of, f in findings.items()}
        last_line({**figures, "leaks": leaks, "seed": options.seed, "outcomes": outcomes})
        exit_by(
            {
                "undocumented is 0": not figures["undocumented"],
                "hangs is 0": not figures["hangs"],
                "nothing leaked": not leaks,
            }
        )


if __name__ == "__main__":
    main()
