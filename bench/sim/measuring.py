"""Runs a case in a process of its own, so that what it holds at most is nobody else's."""

import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench.sim.cases import Case, arrivals, scenario_of
from mesh.domain.outcome import Outcome
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    requests: int
    finished: int
    tokens: int
    decisions: int
    """The decisions of the controller."""
    virtual_s: float
    seconds: float
    """From the making of the cell to the end of its last request."""
    cpu_seconds: float
    """The same without what else the machine did."""
    rss_mb: float
    """The most memory of the whole process, in MB of 10^6 bytes."""

    @property
    def request_us(self) -> float:
        """The CPU time that a request takes."""
        return 1e6 * self.cpu_seconds / self.requests

    @property
    def decisions_per_s(self) -> float:
        return self.decisions / self.seconds


class _Counter:
    """A recorder that counts decisions, and outcomes: a million of them are not kept."""

    def __init__(self) -> None:
        self.decisions = self.requests = self.finished = self.tokens = 0

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        self.decisions += 1

    def ended(self, outcome: Outcome) -> None:
        self.requests += 1
        self.finished += outcome.finished
        self.tokens += len(outcome.tokens_s)


def measure(case: Case) -> Measured:
    """Raises the case's errors."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(_measure, case).result()


def _measure(case: Case) -> Measured:
    scenario, counter = scenario_of(case), _Counter()
    coming = arrivals(case, scenario)
    began_s, computed_s = time.perf_counter(), time.process_time()
    cell = VirtualCell(plan(scenario), recorders=(counter,), ended=counter.ended)
    cell.run(coming)
    seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - computed_s
    return Measured(
        requests=counter.requests,
        finished=counter.finished,
        tokens=counter.tokens,
        decisions=counter.decisions,
        virtual_s=cell.clock.now_s() - cell.started_s,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    )
