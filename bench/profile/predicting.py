"""Each iteration as it was predicted, and as it came: by the profile alone, by the profile as the
iterations before it have refined it, and corrected by what neighbours do, as a node does it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mesh.compute.learned_correction import LearnedCorrection
from mesh.compute.refining import Refinement
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
    """By the profile alone, as it was surveyed."""
    refined_s: float
    """By the profile as iterations have refined it."""
    corrected_s: float
    """By that, and the factor."""

    @property
    def deviation(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1.0)

    @property
    def deviation_refined(self) -> float:
        return abs(self.refined_s / self.measured_s - 1.0)

    @property
    def deviation_corrected(self) -> float:
        return abs(self.corrected_s / self.measured_s - 1.0)


class Predictions:
    """The predictions for one instance."""

    def __init__(self, profile: Profile) -> None:
        self._surveyed = self._times = Times(profile)
        self._refinement = Refinement(profile)
        self._correction = LearnedCorrection()

    def note(self, result: StepResult, now_s: float) -> Iteration:
        """An iteration has just ended. It is predicted first, then learned from."""
        shape, measured_s = result.shape, result.elapsed_s
        refined_s = self._times.iteration_s(shape)
        factor = self._correction.factor(now_s - measured_s)
        self._refinement.note(shape, measured_s, factor)
        self._correction.observe(measured_s, refined_s, now_s, shape)
        refined = self._refinement.refined(now_s)
        if refined is not None:
            was, self._times = self._times, Times(refined)
            self._correction.refined(was, self._times)
            self._refinement = Refinement(refined)
        return Iteration(
            at_s=now_s,
            measured_s=measured_s,
            predicted_s=self._surveyed.iteration_s(shape),
            refined_s=refined_s,
            corrected_s=refined_s * factor,
        )


def whole(iterations: Sequence[Iteration]) -> Iteration:
    """All of them as one."""
    return Iteration(
        at_s=iterations[-1].at_s,
        measured_s=sum(i.measured_s for i in iterations),
        predicted_s=sum(i.predicted_s for i in iterations),
        refined_s=sum(i.refined_s for i in iterations),
        corrected_s=sum(i.corrected_s for i in iterations),
    )


def typical(iterations: Sequence[Iteration]) -> Iteration:
    """Their medians: alike iterations, of which some may have met a stall."""
    return Iteration(
        at_s=iterations[-1].at_s,
        measured_s=median(i.measured_s for i in iterations),
        predicted_s=median(i.predicted_s for i in iterations),
        refined_s=median(i.refined_s for i in iterations),
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
