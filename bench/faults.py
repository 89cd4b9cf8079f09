"""Runs a scenario of faults with many seeds, each held to everything that must hold of any cell.

Two simulated minutes a seed in which nodes crash, links break, loads fail and controllers are
killed; no request or token may be lost or doubled, no byte promised twice, nothing stuck once it is
over. A seed that fails is named with the command that shows it again, and what it broke. The last
line is one JSON object; exit code 1 when a seed failed.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from bench.harness import Report, Table, show_status
from mesh.sim.checking import FaultyRun
from mesh.sim.faults import FaultKind
from mesh.sim.scenario import Scenario, arrivals, faults, plan, read_scenario


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


def played(read: Scenario, seed: int) -> Ran:
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
        yield from (played(read, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(partial(played, read), seeds)


def report(total: Total, wall_s: float, scenario: Path) -> Report:
    kinds = [(kind.value, str(total.faults[kind.value])) for kind in FaultKind]
    ends = [(end, str(count)) for end, count in total.ends.most_common()]
    return Report(
        figures=figures(total, wall_s),
        shown=(
            Table(headings=("FAULT", "COUNT"), rows=kinds),
            Table(headings=("END OF A REQUEST", "COUNT"), rows=ends),
            *(
                f"broken: {broken}\n  again: mesh sim {scenario} --check --seed {seed}"
                for seed, broken in total.broken.items()
            ),
        ),
        targets={"nothing broken": not total.broken},
    )


def run(
    *,
    scenario: Path = Path("workloads/faults.toml"),
    seeds: Annotated[int, "how many seeds"] = 1000,
    first: Annotated[int, "the first of them"] = 0,
    jobs: Annotated[int, "seeds at a time"] = os.cpu_count() or 1,
    quick: bool = False,
) -> Report:
    count = 10 if quick else seeds
    read = read_scenario(scenario)
    total, began_s = Total(), time.perf_counter()
    for ran in runs(read, range(first, first + count), jobs):
        total.add(ran)
        show_status(f"{total.seeds} of {count} seeds, {len(total.broken)} broken")
        if ran.broken:
            print(f"seed {ran.seed}: {ran.broken}", file=sys.stderr, flush=True)
    return report(total, time.perf_counter() - began_s, scenario)
