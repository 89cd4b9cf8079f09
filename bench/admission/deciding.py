"""Times single decisions of a controller core, and undoes each of them before the next."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from bench.admission.cell import NOW_S, PaperCell, placement
from mesh.domain.events import InvokeRequested
from mesh.evaluation.distribution import Distribution

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

    @property
    def outcome(self) -> str:
        """In words."""
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


def measure(
    scenario: Scenario, decisions: int, rounds: int, seed: int, note: Callable[[str], None]
) -> Times:
    """Over several cells of the scenario, with other requests on them each time."""
    times = Times()
    for number in range(rounds):
        note(f"{scenario.nodes} nodes, {scenario.outcome}: cell {number + 1} of {rounds}")
        cell = PaperCell(nodes=scenario.nodes, busy=scenario.busy, seed=seed + number)
        cell.check()
        # As the controller does: its collector need not look at what stays.
        gc.collect()
        gc.freeze()
        _decide(cell, scenario, WARM_UP, Times())
        _decide(cell, scenario, -(-decisions // rounds), times)
        cell.check()
        gc.unfreeze()
    return times


def _decide(cell: PaperCell, scenario: Scenario, decisions: int, times: Times) -> None:
    """Time so many decisions that turn out as the scenario says. Raises SystemExit when too many do
    not: a short prompt may pass where it should not.
    """
    core, clock_ns, cpu_ns = cell.core, time.perf_counter_ns, time.thread_time_ns
    left, others = decisions, 0
    while left:
        request = cell.request()
        event = InvokeRequested(request=request)
        began_ns, start_ns = cpu_ns(), clock_ns()
        actions = core.handle(event, NOW_S)
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
