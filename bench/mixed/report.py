"""What a run on a mixed cell came to: a table by phase and node, and its figures."""

import json

from rich.console import Console
from rich.table import Table

from bench.mixed.cell import FIRST, SECOND
from bench.mixed.judging import Row
from bench.mixed.running import QUIET_AFTER, Run

TARGET = 0.99
"""Of the tokens of admitted requests."""


def report(made: Run) -> None:
    sizes, judged = made.sizes, made.judged
    console = Console(width=100)
    console.print(
        f"TTFT {sizes.slo.ttft_s:g} s, TPOT {sizes.slo.tpot_s:.3f} s: by its profile {FIRST} keeps "
        f"that for {sizes.first_batch} requests at once, {SECOND} for {sizes.second_batch}; "
        f"{sizes.burst} in a burst, of {sizes.prompt_tokens} and {sizes.output_tokens} tokens",
        soft_wrap=True,
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
        f"{made.returned} of {judged.of(QUIET_AFTER).requests} came back",
        soft_wrap=True,
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
