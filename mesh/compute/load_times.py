"""How long a load takes on a node, by the size of its weights: a belief that every load corrects.

A load's time belongs to the node and the tier that the weights come from, not to the model: what
one model's load took is what the next one's is expected by, sizes that are alike counting most. The
past is told as ratios to a prior, a fixed part and a rate, so that a single load of one size says
something of every other. Before: the ends of loads. After: validation, which asks when an instance
is ready.
"""

from collections import deque
from math import log

from mesh.domain.steps import LoadRate

LOADS_KEPT = 16
"""The last ones of a tier."""
AGE_WEIGHT = 0.7
"""Of a load beside the one after it: half of what is known is of the last two."""
LIKENESS = 0.05
"""Sizes that differ by this share count half as much as equal ones."""
UNEVEN_SHARE = 1.0
"""Of the mean deviation of loads so far, by which a promise is longer than their mean."""


class LoadTimes:
    """Of one node and tier."""

    def __init__(self, prior: LoadRate) -> None:
        self._prior = prior
        self._ratios: deque[tuple[int, float]] = deque(maxlen=LOADS_KEPT)
        """Weights, and the seconds over the prior's; the last load first."""
        self._expected_s: dict[int, float] = {}
        """By weights, until the next load."""

    def __bool__(self) -> bool:
        """Whether a load has been seen."""
        return bool(self._ratios)

    def learn(self, weights_bytes: int, seconds: float) -> None:
        """A load has ended well."""
        self._expected_s.clear()
        prior_s = self._prior.load_s(weights_bytes)
        self._ratios.appendleft((weights_bytes, seconds / prior_s if prior_s else 1.0))

    def expected_s(self, weights_bytes: int) -> float:
        """Seconds that a load is planned with: the mean of those before, and what they deviated."""
        known_s = self._expected_s.get(weights_bytes)
        if known_s is None:
            factor = self._factor(weights_bytes) if self._ratios else 1.0
            known_s = self._expected_s[weights_bytes] = factor * self._prior.load_s(weights_bytes)
        return known_s

    def _factor(self, weights_bytes: int) -> float:
        weighed = [
            (AGE_WEIGHT**age / (LIKENESS + _distance(weights_bytes, of_bytes)), ratio)
            for age, (of_bytes, ratio) in enumerate(self._ratios)
        ]
        whole = sum(weight for weight, _ in weighed)
        mean = sum(weight * ratio for weight, ratio in weighed) / whole
        uneven = sum(weight * abs(ratio - mean) for weight, ratio in weighed) / whole
        return mean + UNEVEN_SHARE * uneven


def _distance(one_bytes: int, other_bytes: int) -> float:
    return abs(log(max(one_bytes, 1) / max(other_bytes, 1)))
