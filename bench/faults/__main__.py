"""Runs a scenario of faults with many seeds, each held to everything that must hold of any cell.

Two simulated minutes a seed in which nodes crash, links break, loads fail and controllers are
killed; no request or token may be lost or doubled, no byte promised twice, nothing stuck once it is
over. A seed that fails is named with the command that shows it again, and what it broke. The last
line is one JSON object; exit code 1 when a seed failed.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.printing import errors_told, last_line, show_status, show_table
from mesh.sim.checking import FaultyRun
from mesh.sim.faults import FaultKind
from mesh.sim.scenario import Scenario, arrivals, faults, plan, read_scenario

SCENARIO = Path("workloads/faults.toml")
SEEDS = 1000
QUICK_SEEDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one seed came to."""

    seed: int
    faults: Counter[str]
    ends: Counter[str]
    checks: Counter[str]
    tokens: int
    broken: str = ""
    """What was broken, if anything was."""


@dataclass(slots=True)
class Total:
    """The sums over all seeds so far."""

    seeds: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, ran: Ran) -> None:
        self.seeds += 1
        self.tokens += ran.tokens
        self.faults += ran.faults
        self.ends += ran.ends
        self.checks += ran.checks
        if ran.broken:
            self.broken[ran.seed] = ran.broken


def run(read: Scenario, seed: int) -> Ran:
    """Any failure is the cell's, and told rather than raised: the other seeds go on."""
    scenario = replace(read, seed=seed)
    made = plan(scenario)
    faulty = FaultyRun(made, faults(scenario, made), check=True)
    broken = ""
    try:
        faulty.run(arrivals(scenario))
    except Exception as error:
        broken = f"{type(error).__name__}: {error}"
    counts, outcomes = faulty.counts(), faulty.cell.callers.outcomes
    return Ran(
        seed=seed,
        faults=Counter(dict(counts.faults)),
        ends=Counter(str(outcome.end) for outcome in outcomes),
        checks=Counter(dict(counts.checks)),
        tokens=sum(len(outcome.tokens_s) for outcome in outcomes),
        broken=broken,
    )


def runs(read: Scenario, seeds: Sequence[int], jobs: int) -> Iterator[Ran]:
    """In the order of the seeds, so many at a time."""
    if jobs == 1:
        yield from (run(read, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(partial(run, read), seeds)


def report(total: Total, wall_s: float, scenario: Path) -> None:
    kinds = [(kind.value, str(total.faults[kind.value])) for kind in FaultKind]
    ends = [(end, str(count)) for end, count in total.ends.most_common()]
    show_table(("FAULT", "COUNT"), kinds)
    show_table(("END OF A REQUEST", "COUNT"), ends)
    for seed, broken in total.broken.items():
        print(f"broken: {broken}")
        print(f"  again: mesh sim {scenario} --check --seed {seed}")
    last_line(figures(total, wall_s))


def figures(total: Total, wall_s: float) -> dict[str, object]:
    return {
        "seeds": total.seeds,
        "seeds_broken": sorted(total.broken),
        "requests": sum(total.ends.values()),
        "tokens": total.tokens,
        "faults": {kind.value: total.faults[kind.value] for kind in FaultKind},
        "ends": dict(total.ends.most_common()),
        "checks": dict(sorted(total.checks.items())),
        "wall_s": round(wall_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", type=Path, default=SCENARIO, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--quick", action="store_true", help="a few seeds, to see that it works")
    options = parser.parse_args()
    count = QUICK_SEEDS if options.quick else options.seeds
    with errors_told():
        read = read_scenario(options.scenario)
    total, began_s = Total(), time.perf_counter()
    for ran in runs(read, range(options.first, options.first + count), max(options.jobs, 1)):
        total.add(ran)
        show_status(f"{total.seeds} of {count} seeds, {len(total.broken)} broken")
    show_status("")
    report(total, time.perf_counter() - began_s, options.scenario)
    sys.exit(1 if total.broken else 0)


if __name__ == "__main__":
    main()
