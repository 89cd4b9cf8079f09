"""Times admission decisions of the controller core alone, in cells that exist on paper only.

What is timed is `handle(InvokeRequested)`: the policy's candidates, shadow validation of each, and
the submission (or the wait). It should take as long in a cell of a hundred nodes as in one of a
single node. In overload all that a full cell meets is timed (`bench.admission.overload`).

The last line is one JSON object: `decisions_per_s` by nodes where the first candidate passes,
`decisions_per_s_failing` by how many fail before one passes (on the most nodes),
`decisions_per_s_waiting` by nodes where all fail, `decisions_per_s_overload`; `decision_us_p50` and
`_p99` as the first. `decisions_per_cpu_s`, as the first, and `decisions_per_cpu_s_overload` leave
out what else the machine did. `--beside DIR` runs the benchmark of another checkout as well: by CPU
time this one makes `ratio` (by nodes) and `overload_ratio` times as many decisions as that.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.admission.deciding import Scenario, Times, measure
from bench.admission.overload import measure_overload
from bench.admission.setting import BATCH, DEPLOYMENTS
from bench.printing import errors_told, last_line, show_table
from mesh.cli import output
from mesh.domain.errors import Unavailable

NODES = (1, 10, 100)
FAILING = (1, 4, 16)
WAITING_NODES = (1, 10)
OVERLOADED_NODES, UNLOADED = 10, 100
"""The cell in overload, and how many deployments wait for it."""
DECISIONS = 5000
ROUNDS = 5
TARGET_PER_S = 4825
FEWER = 8
"""Decisions with failing candidates take longer: so many times fewer of them do."""


def scenarios(nodes: tuple[int, ...]) -> list[Scenario]:
    """The first candidate passes; then some fail on the largest cell; then all do."""
    most = max(nodes)
    return [
        *(Scenario(nodes=count) for count in nodes),
        *(Scenario(nodes=most, busy=busy) for busy in FAILING if busy < most),
        *(Scenario(nodes=count, busy=count) for count in WAITING_NODES),
    ]


def run(
    nodes: tuple[int, ...], decisions: int, rounds: int, seed: int
) -> list[tuple[Scenario, Times]]:
    measured = []
    for scenario in scenarios(nodes):
        fewer = decisions // FEWER if scenario.busy else decisions
        measured.append((scenario, measure(scenario, fewer, rounds, seed, output.message)))
    return measured


def run_overload(decisions: int, rounds: int, seed: int) -> Times:
    fewer = decisions // FEWER
    return measure_overload(OVERLOADED_NODES, UNLOADED, fewer, rounds, seed, output.message)


def row(outcome: str, nodes: int, times: Times) -> tuple[str, ...]:
    return (
        outcome,
        str(nodes),
        str(len(times.taken_ns)),
        f"{times.p50_us:.0f}",
        f"{times.p99_us:.0f}",
        f"{times.decisions_per_s:,.0f}",
        f"{times.decisions_per_cpu_s:,.0f}",
    )


def report(measured: list[tuple[Scenario, Times]], overload: Times) -> None:
    rows = [row(scenario.outcome, scenario.nodes, times) for scenario, times in measured]
    rows.append(row(f"none; {UNLOADED} deployments wait", OVERLOADED_NODES, overload))
    show_table(
        ("candidates", "nodes", "decisions", "p50 µs", "p99 µs", "/s", "/CPU s"),
        rows,
        title=f"one admission; nodes of {DEPLOYMENTS} instances with {BATCH} requests each",
    )
    passing = {s.nodes: t for s, t in measured if not s.busy}
    most = max(passing)
    rate, ratio = passing[most].decisions_per_s, passing[most].p50_us / passing[min(passing)].p50_us
    print(
        f"on {most} nodes: {rate:,.0f}/s (≥ {TARGET_PER_S:,}); a decision there takes {ratio:.2f} "
        f"times as long as on {min(passing)}"
    )


def figures(measured: list[tuple[Scenario, Times]], overload: Times) -> dict[str, Any]:
    passing = [(s, t) for s, t in measured if not s.busy]
    failing = [(s, t) for s, t in measured if 0 < s.busy < s.nodes]
    waiting = [(s, t) for s, t in measured if s.busy == s.nodes]
    return {
        "decisions_per_s": {str(s.nodes): round(t.decisions_per_s) for s, t in passing},
        "decisions_per_s_failing": {str(s.busy): round(t.decisions_per_s) for s, t in failing},
        "decisions_per_s_waiting": {str(s.nodes): round(t.decisions_per_s) for s, t in waiting},
        "decisions_per_s_overload": round(overload.decisions_per_s),
        "decisions_per_cpu_s": {str(s.nodes): round(t.decisions_per_cpu_s) for s, t in passing},
        "decisions_per_cpu_s_overload": round(overload.decisions_per_cpu_s),
        "decision_us_p50": {str(s.nodes): round(t.p50_us, 1) for s, t in passing},
        "decision_us_p99": {str(s.nodes): round(t.p99_us, 1) for s, t in passing},
    }


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """By CPU time; of what both have measured."""
    by_nodes, other = ours["decisions_per_cpu_s"], theirs["decisions_per_cpu_s"]
    found: dict[str, Any] = {"ratio": {n: round(by_nodes[n] / other[n], 3) for n in other}}
    overload = "decisions_per_cpu_s_overload"
    if overload in theirs:
        found["overload_ratio"] = round(ours[overload] / theirs[overload], 3)
    return found


def run_beside(checkout: Path, options: Sequence[str]) -> dict[str, Any]:
    """What the benchmark of another checkout says. Raises Unavailable when it fails."""
    command = [sys.executable, "-m", "bench.admission", *options]
    ran = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise Unavailable(f"the benchmark of {checkout} failed with code {ran.returncode}")
    said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--decisions", type=int, default=DECISIONS, help="per scenario")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="cells per scenario")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout")
    options = parser.parse_args()
    decisions, rounds, seed = options.decisions, options.rounds, options.seed
    measured = run(tuple(options.nodes), decisions, rounds, seed)
    overload = run_overload(decisions, rounds, seed)
    report(measured, overload)
    found = figures(measured, overload)
    if options.beside is not None:
        same = ["--decisions", decisions, "--rounds", rounds, "--seed", seed]
        with errors_told():
            nodes = ["--nodes", *options.nodes]
            found |= ratios(found, run_beside(options.beside, [*map(str, [*nodes, *same])]))
    last_line(found)


if __name__ == "__main__":
    main()
