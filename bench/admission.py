"""Times admission decisions of the controller core alone, in cells that exist on paper only.

What is timed is `handle(InvokeRequested)`: the policy's candidates, shadow validation of each, and
the submission (or the wait). It should take as long in a cell of a hundred nodes as in one of a
single node. In overload all that a full cell meets is timed (`bench.admission.overload`).

The last line is one JSON object: `decisions_per_s` by nodes where the first candidate passes,
`decisions_per_s_failing` by how many fail before one passes (on the most nodes),
`decisions_per_s_waiting` by nodes where all fail, `decisions_per_s_overload`; `decision_us_p50` and
`_p99` as the first; `decisions_per_s_tiers` and `decision_us_p99_tiers` by policies whose servers
are in tiers, on the most nodes, of which nearly all are full: of 100 nodes or more these have
targets. `decisions_per_cpu_s`, as the first, and `decisions_per_cpu_s_overload` leave out what else
the machine did. `--beside DIR` runs the benchmark of another checkout as well: by CPU time this one
makes `ratio` (by nodes) and `overload_ratio` times as many decisions as that.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from bench.admission_cell import (
    BATCH,
    DEPLOYMENTS,
    NOW_S,
    TIER_BATCH,
    PaperCell,
    TierCell,
    placement,
)
from bench.harness import Report, Table
from mesh.cli import output
from mesh.domain.actions import ControllerAction
from mesh.domain.errors import Unavailable
from mesh.domain.events import CancelRequested, ControllerEvent, InvokeRequested, PlaceRetryDue
from mesh.domain.request import Request
from mesh.report.distribution import Distribution

WARM_UP = 100
OTHERS_MAX = 0.1
"""Decisions that may turn out otherwise, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cell, of whose nodes the first `busy` cannot take a request; all of them, or none takes
    it in the end.
    """

    nodes: int
    busy: int = 0
    tiers: str = ""
    """The policy of a cell with tiers, in place of the other cell."""

    @property
    def outcome(self) -> str:
        """In words."""
        if self.tiers:
            return f"{self.tiers}, 4 classes, {TIER_BATCH} requests"
        if self.busy == self.nodes:
            return "no candidate passes: it waits"
        return f"{self.busy} fail, the next passes" if self.busy else "the first passes"


@dataclass(slots=True, kw_only=True)
class Times:
    """The times of single decisions of a scenario, in nanoseconds."""

    taken_ns: list[int] = field(default_factory=list)
    computed_ns: int = 0
    """CPU time of all of them: less, where others run on the machine."""

    @property
    def decisions_per_s(self) -> float:
        return 1e9 * len(self.taken_ns) / sum(self.taken_ns)

    @property
    def decisions_per_cpu_s(self) -> float:
        return 1e9 * len(self.taken_ns) / self.computed_ns

    @property
    def p50_us(self) -> float:
        return median(self.taken_ns) / 1e3

    @property
    def p99_us(self) -> float:
        return (Distribution.of(self.taken_ns).at(99) or 0.0) / 1e3


@contextmanager
def settled(check: Callable[[], None]) -> Iterator[None]:
    """The collector need not look at what stays, as in the controller; checked before and after."""
    check()
    gc.collect()
    gc.freeze()
    yield
    check()
    gc.unfreeze()


def measure(
    scenario: Scenario, decisions: int, rounds: int, seed: int, note: Callable[[str], None]
) -> Times:
    """Over several cells of the scenario, with other requests on them each time."""
    times = Times()
    for number in range(rounds):
        note(f"{scenario.nodes} nodes, {scenario.outcome}: cell {number + 1} of {rounds}")
        cell = (
            TierCell(rule=scenario.tiers, servers=scenario.nodes, seed=seed + number)
            if scenario.tiers
            else PaperCell(nodes=scenario.nodes, busy=scenario.busy, seed=seed + number)
        )
        with settled(cell.check):
            _decide(cell, scenario, WARM_UP, Times())
            _decide(cell, scenario, -(-decisions // rounds), times)
    return times


def _decide(cell: PaperCell, scenario: Scenario, decisions: int, times: Times) -> None:
    """Time so many decisions that turn out as the scenario says. Raises SystemExit when too many do
    not: a short prompt may pass where it should not.
    """
    core, clock_ns, cpu_ns = cell.core, time.perf_counter_ns, time.thread_time_ns
    left, others = decisions, 0
    for number in count(1):
        if not left:
            return
        # What is refused at one moment is remembered for that moment: time passes.
        now_s = NOW_S + 1e-6 * number
        event = cell.invoked()
        request = event.request
        began_ns, start_ns = cpu_ns(), clock_ns()
        actions = core.handle(event, now_s)
        end_ns, computed_ns = clock_ns(), cpu_ns() - began_ns
        placed = placement(request, actions)
        candidate = int(placed.instance_id.rpartition("-")[2]) if placed else scenario.nodes
        if candidate == scenario.busy:
            times.taken_ns.append(end_ns - start_ns)
            times.computed_ns += computed_ns
            left -= 1
        else:
            others += 1
        if others > OTHERS_MAX * decisions:
            raise SystemExit(f"error: not so in a cell of {scenario.nodes}: {scenario.outcome}")
        cell.forget(request, placed)


ROUND = 4
"""Decisions of it."""


class Overload:
    """A cell whose `unloaded` deployments have a request each in their queues."""

    def __init__(self, *, nodes: int, unloaded: int, seed: int) -> None:
        self.cell = PaperCell(nodes=nodes, unloaded=unloaded, seed=seed)
        self._waiting: dict[int, Request] = {}
        for number in range(DEPLOYMENTS, DEPLOYMENTS + unloaded):
            self._let_wait(number, Times())

    def check(self) -> None:
        """Raises SystemExit when anything but these requests waits, or one of them does not."""
        deployments = self.cell.core.cell.deployments.values()
        queues = [len(entry.queue) for entry in deployments if entry.queue]
        if queues != [1] * len(self._waiting):
            raise SystemExit(f"error: {len(self._waiting)} deployments are to wait, not {queues}")

    def decide(self, rounds: int, times: Times) -> None:
        """So many rounds, over all that wait in turn. Raises SystemExit if none is placed."""
        core = self.cell.core
        for number in islice(cycle(list(self._waiting)), rounds):
            request = self.cell.request()
            placed = placement(request, self._handle(InvokeRequested(request=request), times))
            if placed is None:
                raise SystemExit("error: a loaded deployment does not take its request")
            self._handle(self.cell.last_token(placed), times)
            gone = self._waiting[number].request_id
            core.handle(CancelRequested(request_id=gone), NOW_S)
            self._let_wait(number, times)
            self._handle(PlaceRetryDue(), times)

    def _let_wait(self, number: int, times: Times) -> None:
        request = self._waiting[number] = self.cell.request(of=number)
        self._handle(InvokeRequested(request=request), times)

    def _handle(self, event: ControllerEvent, times: Times) -> Sequence[ControllerAction]:
        clock_ns, cpu_ns = time.perf_counter_ns, time.thread_time_ns
        began_ns, start_ns = cpu_ns(), clock_ns()
        actions = self.cell.core.handle(event, NOW_S)
        times.taken_ns.append(clock_ns() - start_ns)
        times.computed_ns += cpu_ns() - began_ns
        return actions


def measure_overload(
    nodes: int, unloaded: int, decisions: int, cells: int, seed: int, note: Callable[[str], None]
) -> Times:
    """Over several cells, with other requests on them each time."""
    times = Times()
    for number in range(cells):
        note(f"{nodes} nodes, {unloaded} deployments wait: cell {number + 1} of {cells}")
        overload = Overload(nodes=nodes, unloaded=unloaded, seed=seed + number)
        with settled(overload.check):
            overload.decide(WARM_UP // ROUND, Times())
            overload.decide(-(-decisions // cells // ROUND), times)
    return times


NODES = (1, 10, 100)
FAILING = (1, 4, 16)
WAITING_NODES = (1, 10)
OVERLOADED_NODES, UNLOADED = 10, 100
"""The cell in overload, and how many deployments wait for it."""
TIER_POLICIES = ("polyserve-co", "mesh-slo")
DECISIONS = 5000
ROUNDS = 5
TARGETS = {"decisions_per_s_tiers": ">= 4825", "decision_us_p99_tiers": "<= 2000"}
"""PolyServe's rate (in C++), with 100 servers, 150 requests on each and four classes, and a time
of our own choice.
"""
FEWER = 8
"""Decisions with failing candidates take longer: so many times fewer of them do."""


def scenarios(nodes: tuple[int, ...]) -> list[Scenario]:
    """The first candidate passes; then some fail on the largest cell; then all do."""
    most = max(nodes)
    return [
        *(Scenario(nodes=count) for count in nodes),
        *(Scenario(nodes=most, busy=busy) for busy in FAILING if busy < most),
        *(Scenario(nodes=count, busy=count) for count in WAITING_NODES),
        *(Scenario(nodes=most, tiers=rule) for rule in TIER_POLICIES),
    ]


def placing(
    nodes: tuple[int, ...], decisions: int, rounds: int, seed: int
) -> list[tuple[Scenario, Times]]:
    measured = []
    for scenario in scenarios(nodes):
        fewer = decisions // FEWER if scenario.busy else decisions
        cells = 1 if scenario.tiers else rounds
        measured.append((scenario, measure(scenario, fewer, cells, seed, output.message)))
    return measured


def run_overload(decisions: int, rounds: int, seed: int) -> Times:
    fewer = decisions // FEWER
    return measure_overload(OVERLOADED_NODES, UNLOADED, fewer, rounds, seed, output.message)


def figures(measured: list[tuple[Scenario, Times]], overload: Times) -> dict[str, Any]:
    passing = [(s, t) for s, t in measured if not (s.busy or s.tiers)]
    tiers = [(s, t) for s, t in measured if s.tiers]
    failing = [(s, t) for s, t in measured if 0 < s.busy < s.nodes]
    waiting = [(s, t) for s, t in measured if s.busy == s.nodes]
    return {
        "decisions_per_s": {str(s.nodes): round(t.decisions_per_s) for s, t in passing},
        "decisions_per_s_failing": {str(s.busy): round(t.decisions_per_s) for s, t in failing},
        "decisions_per_s_waiting": {str(s.nodes): round(t.decisions_per_s) for s, t in waiting},
        "decisions_per_s_tiers": {s.tiers: round(t.decisions_per_s) for s, t in tiers},
        "decision_us_p99_tiers": {s.tiers: round(t.p99_us, 1) for s, t in tiers},
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
    """What the benchmark of another checkout says, be its targets reached or not. Raises
    Unavailable when it fails.
    """
    # A checkout from before the harness has a program for every benchmark.
    harness = (checkout / "bench" / "__main__.py").exists()
    program = ["bench", "admission"] if harness else ["bench.admission"]
    command = [sys.executable, "-m", *program, *options]
    ran = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    try:
        said = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = None
    if ran.returncode not in (0, 1) or not isinstance(said, dict):
        raise Unavailable(f"the benchmark of {checkout} failed with code {ran.returncode}")
    return said


def row(outcome: str, nodes: int, times: Times) -> tuple[str, ...]:
    rates = (f"{times.decisions_per_s:,.0f}", f"{times.decisions_per_cpu_s:,.0f}")
    spread = (f"{times.p50_us:.0f}", f"{times.p99_us:.0f}")
    return (outcome, str(nodes), str(len(times.taken_ns)), *spread, *rates)


def report(measured: list[tuple[Scenario, Times]], overload: Times) -> list[Table | str]:
    rows = [row(scenario.outcome, scenario.nodes, times) for scenario, times in measured]
    rows.append(row(f"none; {UNLOADED} deployments wait", OVERLOADED_NODES, overload))
    table = Table(
        headings=("candidates", "nodes", "decisions", "p50 µs", "p99 µs", "/s", "/CPU s"),
        rows=rows,
        title=f"one admission; nodes of {DEPLOYMENTS} instances with {BATCH} requests each",
    )
    passing = {s.nodes: t for s, t in measured if not (s.busy or s.tiers)}
    most = max(passing)
    rate, ratio = passing[most].decisions_per_s, passing[most].p50_us / passing[min(passing)].p50_us
    return [
        table,
        (
            f"on {most} nodes: {rate:,.0f}/s; a decision there takes "
            f"{ratio:.2f} times as long as on {min(passing)}"
        ),
    ]


def run(
    *,
    nodes: Annotated[tuple[int, ...], "the nodes of the cells"] = NODES,
    decisions: Annotated[int, "decisions of each scenario"] = DECISIONS,
    rounds: Annotated[int, "cells of each scenario"] = ROUNDS,
    seed: int = 1,
    beside: Path | None = None,
) -> Report:
    measured = placing(tuple(nodes), decisions, rounds, seed)
    overload = run_overload(decisions, rounds, seed)
    found = figures(measured, overload)
    if beside is not None:
        same = ["--nodes", *nodes, "--decisions", decisions, "--rounds", rounds, "--seed", seed]
        found |= ratios(found, run_beside(beside, [*map(str, same)]))
    targets = TARGETS if max(nodes) >= max(NODES) else {}
    return Report(figures=found, shown=report(measured, overload), targets=targets)
