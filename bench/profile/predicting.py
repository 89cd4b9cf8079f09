"""Each iteration as it was predicted, and as it came: by the profile alone, and corrected by what
the iterations before it have taught, as a node does it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mesh.compute.learned_correction import LearnedCorrection
from mesh.compute.times import Times
from mesh.domain.profile import Profile
from mesh.domain.steps import StepResult

TOLERANCE = 0.15
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One, or several as one. `at_s` is when it ended."""

    at_s: float
    measured_s: float
    predicted_s: float
    """By the profile alone."""
    corrected_s: float

    @property
    def deviation(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1.0)

    @property
    def deviation_corrected(self) -> float:
        return abs(self.corrected_s / self.measured_s - 1.0)


class Predictions:
    """Of one instance."""

    def __init__(self, profile: Profile) -> None:
        self._times = Times(profile)
        self._correction = LearnedCorrection()

    def note(self, result: StepResult, now_s: float) -> Iteration:
        """An iteration has just ended. It is predicted first, then learned from."""
        predicted_s = self._times.iteration_s(result.shape)
        factor = self._correction.factor(now_s - result.elapsed_s)
        self._correction.observe(result.elapsed_s, predicted_s, now_s)
        return Iteration(
            at_s=now_s,
            measured_s=result.elapsed_s,
            predicted_s=predicted_s,
            corrected_s=predicted_s * factor,
        )


def whole(iterations: Sequence[Iteration]) -> Iteration:
    """All of them as one."""
    return Iteration(
        at_s=iterations[-1].at_s,
        measured_s=sum(i.measured_s for i in iterations),
        predicted_s=sum(i.predicted_s for i in iterations),
        corrected_s=sum(i.corrected_s for i in iterations),
    )


def typical(iterations: Sequence[Iteration]) -> Iteration:
    """Their medians: alike iterations, of which some may have met a stall."""
    return Iteration(
        at_s=iterations[-1].at_s,
        measured_s=median(i.measured_s for i in iterations),
        predicted_s=median(i.predicted_s for i in iterations),
        corrected_s=median(i.corrected_s for i in iterations),
    )


def right_after_s(iterations: Sequence[Iteration], change_s: float) -> float | None:
    """Seconds from a change until corrected predictions are right again: the median of those in the
    second that follows is off by TOLERANCE at most. None if that never comes.
    """
    ends_s = [iteration.at_s for iteration in iterations]
    for start in range(bisect_left(ends_s, change_s), len(iterations)):
        end = bisect_left(ends_s, ends_s[start] + WINDOW_S)
        if end == len(iterations):
            return None
        if median(i.deviation_corrected for i in iterations[start:end]) <= TOLERANCE:
            return ends_s[start] - change_s
    return None
