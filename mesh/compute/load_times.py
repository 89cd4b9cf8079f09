"""How long a load takes on a node, by the size of its weights: a belief that every load corrects.

A load's time belongs to the node and the tier that the weights come from, not to the model: what
one model's load took is what the next one's is expected by, sizes that are alike counting most. The
past is told as ratios to a prior, a fixed part and a rate, so that a single load of one size says
something of every other. Before: the ends of loads. After: validation, which asks when an instance
is ready.
"""

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import log
from statistics import mean, median

from mesh.domain.steps import LoadRate, LoadTier

PRIORS = {
    LoadTier.REMOTE: LoadRate(fixed_s=2.0, bytes_per_s=0.05e9),
    LoadTier.DISK: LoadRate(fixed_s=0.5, bytes_per_s=0.5e9),
    LoadTier.PREPARED: LoadRate(fixed_s=0.2, bytes_per_s=1e9),
    LoadTier.HOST: LoadRate(fixed_s=0.2, bytes_per_s=4e9),
}
"""Expected of loads until one has been seen, where the node does not say. From its host's memory:
at most half of the rate of its bus.
"""
LOADS_KEPT = 16
"""The last ones of a tier."""
AGE_WEIGHT = 0.7
"""Of a load beside the one after it: half of what is known is of the last two."""
LIKENESS = 0.05
"""Sizes that differ by this share count half as much as equal ones."""
UNEVEN_SHARE = 1.0
"""Of the mean deviation of loads so far, by which a promise is longer than their mean."""
SIZES_APART = 1.5
"""Of two loads, one over the other, that tell something of the rate."""


class LoadTimes:
    """Of one node and tier."""

    def __init__(self, prior: LoadRate) -> None:
        self.prior = prior
        self._ratios: deque[tuple[int, float]] = deque(maxlen=LOADS_KEPT)
        """Weights, and the seconds over the prior's; the last load first."""
        self._expected_s: dict[int, float] = {}
        """By weights, until the next load."""

    def __len__(self) -> int:
        """Loads that it goes by."""
        return len(self._ratios)

    @property
    def factor(self) -> float:
        """What loads have taken over what the prior says, in the mean."""
        return mean(ratio for _, ratio in self._ratios) if self._ratios else 1.0

    def learn(self, weights_bytes: int, seconds: float) -> None:
        """A load has ended well."""
        self._expected_s.clear()
        prior_s = self.prior.load_s(weights_bytes)
        self._ratios.appendleft((weights_bytes, seconds / prior_s if prior_s else 1.0))

    def expected_s(self, weights_bytes: int) -> float:
        """Seconds that a load is planned with: the mean of those before, and what they deviated."""
        known_s = self._expected_s.get(weights_bytes)
        if known_s is None:
            factor = self._factor(weights_bytes) if self._ratios else 1.0
            known_s = self._expected_s[weights_bytes] = factor * self.prior.load_s(weights_bytes)
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


def fitted(loads: Sequence[tuple[int, float]], prior: LoadRate) -> LoadRate:
    """The straight line through loads (weights, seconds) of which some may have been held up: the
    median of the slopes between any two that are of unlike sizes (Theil 1950, Sen 1968). Where no
    such line ascends from 0 s or more, the prior, as many times as long as the median load took.
    """
    slopes = [
        (more_s - less_s) / (more_bytes - less_bytes)
        for (less_bytes, less_s), (more_bytes, more_s) in combinations(sorted(loads), 2)
        if more_bytes > less_bytes * SIZES_APART
    ]
    s_per_byte = median(slopes) if slopes else 0.0
    fixed_s = median(seconds - weights_bytes * s_per_byte for weights_bytes, seconds in loads)
    if s_per_byte > 0.0 and fixed_s >= 0.0:
        return LoadRate(fixed_s=fixed_s, bytes_per_s=1.0 / s_per_byte)
    factor = median(seconds / prior.load_s(weights_bytes) for weights_bytes, seconds in loads)
    return LoadRate(fixed_s=prior.fixed_s * factor, bytes_per_s=prior.bytes_per_s / factor)


def _distance(one_bytes: int, other_bytes: int) -> float:
    return abs(log(max(one_bytes, 1) / max(other_bytes, 1)))
