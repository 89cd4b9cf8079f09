"""Tells whether the machine is as quiet as it was for the survey: a shared one is so only at times.

A virtual machine's neighbours lengthen iterations by half for seconds, and nothing on the machine
shows them. So a reference iteration is timed before and after each workload, which is measured
again when either took longer than its profile says, within a budget of time.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

from mesh.domain.profile import IterationShape

REFERENCE = IterationShape(prefill_tokens=64)
BEFORE_IT = IterationShape(decode_batch=1, decode_context_tokens=64)
"""A survey times prefills that follow an iteration of another size; so does this."""
AGREEMENT = 0.08
"""How near the reference must be to its profile: the machine may be quicker than it was, too."""
REPEATS = 3
"""The reference is timed so often; the median counts."""
PAUSE_S = 0.5
"""Before a workload is measured again."""
BUDGET_S = 300.0
"""For measuring again; then workloads count as they come."""

T = TypeVar("T")


class Quiet:
    """`measure` gives the seconds of one iteration, `reference_s` is what REFERENCE takes by the
    profile.
    """

    def __init__(self, measure: Callable[[IterationShape], float], reference_s: float) -> None:
        self._measure = measure
        self._expected_s = reference_s
        self._spent_s = 0.0
        self.first_tries: int = 0
        self.disturbed_first: int = 0
        """Workloads that were disturbed at the first try."""
        self.disturbed: int = 0
        """Workloads that count though the machine was not quiet: the budget was spent."""

    def undisturbed(self, workload: Callable[[], T]) -> tuple[T, T]:
        """The workload's first outcome, and that of the first quiet time."""
        first, quiet = self._once(workload)
        outcome, first_end_s = first, time.perf_counter()
        self.first_tries += 1
        self.disturbed_first += not quiet
        while not quiet and self._spent_s + time.perf_counter() - first_end_s < BUDGET_S:
            time.sleep(PAUSE_S)
            outcome, quiet = self._once(workload)
        self.disturbed += not quiet
        self._spent_s += time.perf_counter() - first_end_s
        return first, outcome

    def _once(self, workload: Callable[[], T]) -> tuple[T, bool]:
        before = self._as_surveyed()
        outcome = workload()
        return outcome, self._as_surveyed() and before

    def _as_surveyed(self) -> bool:
        times_s = []
        for _ in range(REPEATS):
            self._measure(BEFORE_IT)
            times_s.append(self._measure(REFERENCE))
        return abs(median(times_s) / self._expected_s - 1.0) <= AGREEMENT
