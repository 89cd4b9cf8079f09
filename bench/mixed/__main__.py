"""Offers a cell of an OpenVINO node and a vLLM node bursts that the first cannot compute alone.

Shadow validation sends what is too much for the first node to the second, and the quiet after each
burst comes back. The client times every token. The last line is one JSON object: `met_share` is of
the tokens of admitted requests, `spilled` counts requests of bursts that the second node served,
`returned` those after bursts that the first one did.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.mixed.cell import FIRST, SECOND, MixedCell
from bench.mixed.judging import Row
from bench.mixed.running import QUIET_AFTER, Run, model_in, promise, run
from bench.mixed.workload import CannotSpill, Requests
from bench.status_line import show_status
from mesh.domain.errors import MeshError

ROUNDS, QUIET_REQUESTS = 6, 6
REQUESTS = Requests(prompt_tokens=64, output_tokens=96, ttft_s=8.0)
TARGET = 0.99


def report(made: Run) -> None:
    sizes, judged = made.sizes, made.judged
    console = Console(width=100)
    console.print(
        f"TTFT {sizes.slo.ttft_s:g} s, TPOT {sizes.slo.tpot_s:.3f} s: by its profile {FIRST} keeps "
        f"that for {sizes.first_batch} requests at once, {SECOND} for {sizes.second_batch}; "
        f"{sizes.burst} in a burst"
    )
    table = Table(box=None)
    for heading in ("PHASE", "NODE"):
        table.add_column(heading)
    for heading in ("REQUESTS", "TOKENS", "IN TIME", "TTFT_P50_S", "TOKENS/S"):
        table.add_column(heading, justify="right")
    for row in judged.rows():
        table.add_row(*_cells(row))
    console.print(table)
    console.print(
        f"{judged.met_share:.2%} of the tokens in time (≥ {TARGET:.0%}), the tightest with "
        f"{judged.spare_s_least:.2f} s to spare; {made.spilled} requests spilled over; "
        f"{made.returned} of {judged.of(QUIET_AFTER).requests} came back"
    )
    print(json.dumps(figures(made)))


def _cells(row: Row) -> tuple[str, ...]:
    share = f"{row.met_tokens / row.tokens:.1%}" if row.tokens else "-"
    return (
        row.phase,
        row.node_id or "refused",
        str(row.requests),
        str(row.tokens),
        share,
        f"{row.ttft_s_p50:.2f}" if row.tokens else "-",
        f"{row.tokens_per_s:.1f}" if row.tokens else "-",
    )


def figures(made: Run) -> dict[str, object]:
    judged, slo = made.judged, made.sizes.slo
    return {
        "requests": judged.requests,
        "admitted": len(judged.admitted),
        "refused": len(judged.refused),
        "refused_by_reason": judged.refused_by_reason,
        "torn": len(judged.torn),
        "met_share": round(judged.met_share, 4),
        "spare_s_least": round(judged.spare_s_least, 3),
        "spilled": made.spilled,
        "returned": made.returned,
        "after_bursts": judged.of(QUIET_AFTER).requests,
        "ttft_slo_s": slo.ttft_s,
        "tpot_slo_s": round(slo.tpot_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="bursts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder, MixedCell(Path(folder)) as cell:
            sized = promise(cell, model_in(Path(folder)), REQUESTS, show_status)
            made = run(
                cell,
                sized,
                REQUESTS,
                rounds=options.rounds,
                quiet_requests=QUIET_REQUESTS,
                seed=options.seed,
                note=show_status,
            )
    except (MeshError, CannotSpill) as error:
        sys.exit(f"error: {error}")
    show_status("")
    report(made)


if __name__ == "__main__":
    main()
