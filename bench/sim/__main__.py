"""Times the simulator: half an hour of 128 deployments on eight nodes; how time and memory grow.

The load is the generator's, with the figures of LLM-Mesh's own; `--trace FILE` takes the arrivals
from a file. `--growth` simulates larger cells as well (the same load on each eight nodes, so many
times shorter), and then more and more short requests on eight nodes. The last line is one JSON
object: `seconds`, `cpu_seconds`, `rss_mb`, `requests`, `tokens`, `decisions_per_s`; with `--growth`
also `request_us` (of CPU time) and `rss_mb` by nodes and by requests, and `growth`: its rows.
"""

import argparse
import sys
from pathlib import Path

from bench.printing import errors_told, last_line, show_status
from bench.sim.cases import NODES, Case
from bench.sim.measuring import Measured, measure

SECONDS_MAX, RSS_MB_MAX = 20.0, 500.0
GROWTH_NODES = (80, 1000)
GROWTH_REQUESTS = (10_000, 100_000, 1_000_000)
HEADINGS = (
    ("nodes", 6),
    ("requests", 16),
    ("finished", 10),
    ("tokens", 10),
    ("seconds", 8),
    ("CPU s", 7),
    ("CPU µs/request", 15),
    ("decisions/s", 12),
    ("RSS MB", 7),
)
"""The headings of the table's columns, and how wide the columns are."""


def cases(options: argparse.Namespace) -> list[tuple[str, Case]]:
    """With what grows in each: nothing in the first."""
    made = [("", Case(seed=options.seed, trace=options.trace))]
    if options.growth:
        made += [("nodes", Case(seed=options.seed, nodes=count)) for count in options.nodes]
        made += [("requests", Case(seed=options.seed, short=count)) for count in options.requests]
    return made


def print_row(*cells: str) -> None:
    """As soon as it is known: a run takes minutes."""
    show_status("")
    print("".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, HEADINGS, strict=True)))
    sys.stdout.flush()


def print_measured(case: Case, found: Measured) -> None:
    print_row(
        f"{case.nodes:,}",
        f"{found.requests:,}{' short' if case.short else ''}",
        f"{found.finished:,}",
        f"{found.tokens:,}",
        f"{found.seconds:.1f}",
        f"{found.cpu_seconds:.1f}",
        f"{found.request_us:,.0f}",
        f"{found.decisions_per_s:,.0f}",
        f"{found.rss_mb:.0f}",
    )


def figures(measured: list[tuple[str, Case, Measured]]) -> dict[str, object]:
    first = measured[0][2]
    found: dict[str, object] = {
        "seconds": round(first.seconds, 2),
        "cpu_seconds": round(first.cpu_seconds, 2),
        "rss_mb": round(first.rss_mb, 1),
        "requests": first.requests,
        "tokens": first.tokens,
        "decisions_per_s": round(first.decisions_per_s),
    }
    for kind in ("nodes", "requests"):
        of = [(case.short or case.nodes, m) for grown, case, m in measured if grown == kind]
        if of:
            of = [(NODES, first), *of] if kind == "nodes" else of
            found[f"request_us_by_{kind}"] = {str(n): round(m.request_us, 1) for n, m in of}
            found[f"rss_mb_by_{kind}"] = {str(n): round(m.rss_mb, 1) for n, m in of}
    if len(measured) > 1:
        found["growth"] = [row(case, m) for _, case, m in measured]
    return found


def row(case: Case, found: Measured) -> dict[str, object]:
    return {
        "nodes": case.nodes,
        "short": case.short is not None,
        "requests": found.requests,
        "finished": found.finished,
        "tokens": found.tokens,
        "seconds": round(found.seconds, 2),
        "cpu_seconds": round(found.cpu_seconds, 2),
        "request_us": round(found.request_us, 1),
        "rss_mb": round(found.rss_mb, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in place of the generator")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth", action="store_true", help="larger cells, more requests")
    parser.add_argument("--nodes", type=int, nargs="*", default=GROWTH_NODES, metavar="N")
    parser.add_argument("--requests", type=int, nargs="*", default=GROWTH_REQUESTS, metavar="N")
    options = parser.parse_args()
    if any(count % NODES for count in options.nodes):
        parser.error(f"cells grow by {NODES} nodes: give --nodes multiples of {NODES}")
    measured = []
    print_row(*(heading for heading, _ in HEADINGS))
    with errors_told():
        for kind, case in cases(options):
            load = f"{case.short:,} short requests" if case.short else "the load"
            show_status(f"{load} on {case.nodes} nodes")
            found = measure(case)
            measured.append((kind, case, found))
            print_measured(case, found)
    first = measured[0][2]
    print(
        f"{first.virtual_s / 60:.0f} minutes in {first.seconds:.1f} s (≤ {SECONDS_MAX:.0f}) and "
        f"{first.rss_mb:.0f} MB (≤ {RSS_MB_MAX:.0f})"
    )
    last_line(figures(measured))


if __name__ == "__main__":
    main()
