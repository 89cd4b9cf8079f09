"""By how much a node computes a model more slowly than its profile says: a factor.

`factor` is the mean of measured over predicted time, exponentially weighted by predicted compute
time: it follows a noisy neighbour within a few seconds of computing whatever the length of an
iteration. Without iterations it returns to 1: nothing speaks for it any more, and a node that is
thought too slow to be used would never be found to be well again. `planned` is what promises rest
on: never below, and as high as the node says that it has lately been. The node learns both
(`learned_correction`), the controller is told.

Where the profile is an estimate, nothing speaks for the 1 to begin with: the first iterations count
as if there were no past, and what they tell is not forgotten. Until some have been seen, the
estimate is on trial.
"""

from collections.abc import Collection
from math import exp, inf
from typing import Protocol, Self

from mesh.domain.profile import Profile

RATIO_MIN, RATIO_MAX = 0.25, 8.0
"""The bounds of the ratio of a single iteration, and hence of the factor, too."""
LEARNING_S = 0.5
"""Predicted compute time after which the past counts for 37 %."""
FORGETTING_S = 10.0
"""Idle time after which 37 % of the deviation from 1 is left."""
TRIAL_ITERATIONS = 8
"""After which an estimate is taken to be corrected: a prompt, and some decodes."""


class Correction:
    """Belongs to one model on one node, or to whatever else lengthens iterations."""

    __slots__ = ("_at_s", "_factor", "_forgetting_s", "_planned", "_seen_s", "trial_left")

    def __init__(
        self, factor: float = 1.0, *, forgetting_s: float = FORGETTING_S, guessed: bool = False
    ) -> None:
        """`guessed`: what is corrected is no more than an estimate."""
        self.trial_left = TRIAL_ITERATIONS if guessed else 0
        """Iterations until an estimate is taken to be corrected; 0 for what was measured."""
        self._seen_s = 0.0 if guessed else inf
        """Predicted compute time that the factor is the mean of, where there was none before."""
        self._forgetting_s = inf if guessed else forgetting_s
        self._factor = bounded(factor)
        self._planned = 0.0
        """As told last; 0 before."""
        self._at_s = 0.0

    @classmethod
    def of(cls, profile: Profile) -> Self:
        return cls(guessed=not profile.measured)

    @property
    def untried(self) -> bool:
        """Whether it corrects an estimate of which no iteration has told anything."""
        return self.trial_left == TRIAL_ITERATIONS

    @property
    def latest(self) -> float:
        """As of the last iteration, however long ago."""
        return self._factor

    def factor(self, now_s: float) -> float:
        """By which predictions are to be multiplied now."""
        return self._faded(now_s - self._at_s)

    def planned(self, now_s: float) -> float:
        """By which predictions are to be multiplied that a promise rests on: never below `factor`,
        nor below what the node has told.
        """
        factor = self._faded(now_s - self._at_s)
        return factor if factor > self._planned else self._planned

    def observe(self, measured_s: float, predicted_s: float, now_s: float) -> None:
        """An iteration has ended. `predicted_s` is the profile's, uncorrected."""
        if predicted_s <= 0.0:
            return
        ratio = bounded(measured_s / predicted_s)
        before = self._faded(now_s - self._at_s - measured_s)
        self._seen_s += predicted_s
        weight = max(1.0 - exp(-predicted_s / LEARNING_S), predicted_s / self._seen_s)
        self.note_factor(before + (ratio - before) * weight, now_s)

    def reported(self, factor: float, now_s: float, *, beside_load: bool = False) -> None:
        """The node that sees the iterations tells the factor after one of them. An iteration beside
        a load tells its node what loads cost and corrects no estimate: it is none of the trial's,
        unless it was quicker than estimated all the same.
        """
        if self.trial_left and not beside_load:
            self.trial_left -= 1
        self.note_factor(factor, now_s)

    def note_factor(self, factor: float, now_s: float, *, planned: float | None = None) -> None:
        """The factor is known from elsewhere: whoever sees the iterations has reported it, and by
        what to plan, which holds until that is told anew. What it was while an estimate was on
        trial says nothing about neighbours.
        """
        self._factor = bounded(factor)
        self._at_s = now_s
        if planned is not None:
            self._planned = 0.0 if self.trial_left else bounded(planned)

    def _faded(self, idle_s: float) -> float:
        if idle_s <= 0.0 or self._factor == 1.0:
            return self._factor
        return 1.0 + (self._factor - 1.0) * exp(-idle_s / self._forgetting_s)


class Corrected(Protocol):
    """An instance of a node."""

    @property
    def profile(self) -> Profile | None: ...
    @property
    def correction(self) -> Correction: ...


def share_trials(instances: Collection[Corrected], now_s: float) -> None:
    """What has corrected an estimate corrects the same estimate of those instances of the node, of
    whatever model, that have not tried it out.
    """
    tried = [(i.profile, i.correction) for i in instances if not i.correction.trial_left]
    for instance in instances:
        mine, correction = instance.profile, instance.correction
        if mine is None or not correction.untried:
            continue
        for profile, found in tried:
            if profile is not None and profile.estimates_the_same_as(mine):
                correction.note_factor(found.latest, now_s)
                break


def bounded(ratio: float) -> float:
    if RATIO_MIN <= ratio <= RATIO_MAX:
        return ratio
    return RATIO_MIN if ratio < RATIO_MIN else RATIO_MAX
