"""Times admission decisions of the controller core alone, in cells that exist on paper only.

What is timed is `handle(InvokeRequested)`: the policy's candidates, shadow validation of each, and
the submission (or the wait). It should take as long in a cell of a hundred nodes as in one of a
single node. The last line is one JSON object: `decisions_per_s` by nodes where the first candidate
passes, `decisions_per_s_failing` by how many fail before one passes (on the most nodes), and
`decisions_per_s_waiting` by nodes where all fail; `decision_us_p50` and `_p99` as the first, and
`decisions_per_cpu_s`, which leaves out what else the machine did.
"""

import argparse

from bench.admission.deciding import Scenario, Times, measure
from bench.admission.setting import BATCH, DEPLOYMENTS
from bench.printing import last_line, show_table
from mesh.cli import output

NODES = (1, 10, 100)
FAILING = (1, 4, 16)
WAITING_NODES = (1, 10)
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


def report(measured: list[tuple[Scenario, Times]]) -> None:
    rows = [
        (
            scenario.outcome,
            str(scenario.nodes),
            str(len(times.taken_ns)),
            f"{times.p50_us:.0f}",
            f"{times.p99_us:.0f}",
            f"{times.decisions_per_s:,.0f}",
            f"{times.decisions_per_cpu_s:,.0f}",
        )
        for scenario, times in measured
    ]
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
    last_line(figures(measured))


def figures(measured: list[tuple[Scenario, Times]]) -> dict[str, dict[str, float]]:
    passing = [(s, t) for s, t in measured if not s.busy]
    failing = [(s, t) for s, t in measured if 0 < s.busy < s.nodes]
    waiting = [(s, t) for s, t in measured if s.busy == s.nodes]
    return {
        "decisions_per_s": {str(s.nodes): round(t.decisions_per_s) for s, t in passing},
        "decisions_per_s_failing": {str(s.busy): round(t.decisions_per_s) for s, t in failing},
        "decisions_per_s_waiting": {str(s.nodes): round(t.decisions_per_s) for s, t in waiting},
        "decisions_per_cpu_s": {str(s.nodes): round(t.decisions_per_cpu_s) for s, t in passing},
        "decision_us_p50": {str(s.nodes): round(t.p50_us, 1) for s, t in passing},
        "decision_us_p99": {str(s.nodes): round(t.p99_us, 1) for s, t in passing},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--decisions", type=int, default=DECISIONS, help="per scenario")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="cells per scenario")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report(run(tuple(options.nodes), options.decisions, options.rounds, options.seed))


if __name__ == "__main__":
    main()
