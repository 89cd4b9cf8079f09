"""How long a load takes on a node, by the size of its weights: a belief that every load corrects.

A load's time belongs to the node and the tier that the weights come from, not to the model: what
one model's load took is what the next one's is expected by, sizes that are alike counting most. The
past is told as ratios to a prior, a fixed part and a rate, so that a single load of one size says
something of every other; and as of loads alone, so that those beside iterations say something of
those without. Before: the ends of loads. After: validation, which asks when an instance is ready.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations, repeat
from math import inf, log, sqrt
from statistics import fmean, median

from mesh.domain.steps import LoadRate, LoadTier
from mesh.domain.values import dataclass

PRIORS = {
    LoadTier.REMOTE: LoadRate(fixed_s=2.0, bytes_per_s=0.05e9),
    LoadTier.DISK: LoadRate(fixed_s=0.5, bytes_per_s=0.5e9),
    LoadTier.PREPARED: LoadRate(fixed_s=0.2, bytes_per_s=1e9),
    LoadTier.CACHED: LoadRate(fixed_s=0.15, bytes_per_s=1.5e9),
    LoadTier.HOST: LoadRate(fixed_s=0.2, bytes_per_s=4e9),
}
"""The rates that loads are expected to have until one has been seen, where the node does not state
its own. From the host's memory, a load gets at most half of the rate of its bus.
"""
LOADS_KEPT = 32
"""The last ones of a tier."""
AGE_WEIGHT = 0.9
"""The weight of a load relative to the one after it: the last seven loads have half of the
weight.
"""
LIKENESS = 0.05
"""Sizes that differ by this share count half as much as equal ones."""
UNEVEN_SHARE = 1.0
"""A promise is longer than the mean of the loads so far by this share of their mean deviation."""
SIZES_APART = 1.5
"""Two loads tell something of the rate only if one is this many times as large as the other."""
SHARES_APART = 0.3
"""Two loads tell something of the slowdown only if the shares of time in which the node computed
differ by this much.
"""
SLOWDOWN_MAX = 8.0
STATED_PAIRS = 4
"""The slowdown that a node states counts as much as this many pairs of loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLoad:
    weights_bytes: int
    ratio: float
    """How long the load took over what the prior says of a load alone."""
    beside_share: float
    """The share of the load's time in which the node computed."""

    def alone(self, slowdown: float) -> float:
        """The ratio that it would have had."""
        return self.ratio / (1.0 + slowdown * self.beside_share)


class TierLoads:
    """The last loads of one node and tier."""

    def __init__(self, prior: LoadRate) -> None:
        self.prior = prior
        self._loads: deque[PastLoad] = deque(maxlen=LOADS_KEPT)
        """The last one first."""

    def __len__(self) -> int:
        return len(self._loads)

    def learn(self, weights_bytes: int, seconds: float, computed_s: float) -> None:
        prior_s = self.prior.load_s(weights_bytes)
        self._loads.appendleft(
            PastLoad(
                weights_bytes=weights_bytes,
                ratio=seconds / prior_s if prior_s else 1.0,
                beside_share=min(computed_s / seconds, 1.0) if seconds > 0.0 else 0.0,
            )
        )

    def factor(self, slowdown: float) -> float:
        """What loads alone take over what the prior says, in the mean."""
        return fmean(load.alone(slowdown) for load in self._loads)

    def slowdowns(self) -> Iterator[float]:
        """See the function of this name."""
        return slowdowns([(load.ratio, load.beside_share) for load in self._loads])

    def alone_s(self, weights_bytes: int, slowdown: float) -> tuple[float, float]:
        """The times of a load alone: the median, and the mean plus the loads' deviation from it."""
        weighed = [
            (load.alone(slowdown), AGE_WEIGHT**age / (LIKENESS + _distance(weights_bytes, load)))
            for age, load in enumerate(self._loads)
        ]
        whole = sum(weight for _, weight in weighed)
        mean = sum(ratio * weight for ratio, weight in weighed) / whole
        uneven = sum(abs(ratio - mean) * weight for ratio, weight in weighed) / whole
        prior_s = self.prior.load_s(weights_bytes)
        return _middle(weighed, whole) * prior_s, (mean + UNEVEN_SHARE * uneven) * prior_s


class LoadTimes:
    """What is known of the loads of one node, or of all nodes of one kind. A load beside which the
    node computes for a share of its time takes longer by that share of `slowdown`, whatever its
    tier.
    """

    def __init__(self, busy_load_factor: float) -> None:
        """As the node states it; 1: it makes no difference, and none is learned."""
        self._stated = stated_slowdown(busy_load_factor)
        self.slowdown = self._stated
        self.seen = False
        """Loads have told of it."""
        self._tiers: dict[LoadTier, TierLoads] = {}
        self._alone_s: dict[tuple[LoadTier, int], tuple[float, float]] = {}
        """By tier and weights, until the next load."""

    def is_of(self, busy_load_factor: float) -> bool:
        """Whether the node still states the same."""
        return self._stated == stated_slowdown(busy_load_factor)

    def tier(self, tier: LoadTier) -> TierLoads | None:
        """None where no load has come from it."""
        return self._tiers.get(tier)

    def learn(
        self,
        tier: LoadTier,
        prior: LoadRate,
        weights_bytes: int,
        seconds: float,
        computed_s: float = 0.0,
    ) -> None:
        """A load has ended well, and the node has computed for so long beside it."""
        self._alone_s.clear()
        self._tiers.setdefault(tier, TierLoads(prior)).learn(weights_bytes, seconds, computed_s)
        if self._stated:
            seen = [each for loads in self._tiers.values() for each in loads.slowdowns()]
            self.seen = bool(seen)
            self.slowdown = learned_slowdown(self._stated, seen)

    def expected_s(self, tier: LoadTier, weights_bytes: int) -> float:
        """How long a load takes alone; longer and shorter are equally likely. One must have come
        from the tier.
        """
        return self._known_s(tier, weights_bytes)[0]

    def planned_s(self, tier: LoadTier, weights_bytes: int) -> float:
        """The same as promises rest on: longer by what loads have deviated."""
        return self._known_s(tier, weights_bytes)[1]

    def _known_s(self, tier: LoadTier, weights_bytes: int) -> tuple[float, float]:
        known = self._alone_s.get((tier, weights_bytes))
        if known is None:
            known = self._tiers[tier].alone_s(weights_bytes, self.slowdown)
            self._alone_s[tier, weights_bytes] = known
        return known


def stated_slowdown(busy_load_factor: float) -> float:
    """No load takes less time beside iterations, whatever a node states."""
    return max(busy_load_factor - 1.0, 0.0)


def learned_slowdown(stated: float, seen: Iterable[float]) -> float:
    """By what a node states, and what pairs of its loads say (`slowdowns`)."""
    return median([*seen, *repeat(stated, STATED_PAIRS)])


def beside_s(alone_s: float, slowdown: float, computes_s: float) -> float:
    """Seconds of a load beside which its node computes from its begin on for so long, if it lasts
    as long: t = alone_s (1 + slowdown min(computes_s / t, 1)), solved for t.
    """
    longest_s = alone_s * (1.0 + slowdown)
    if computes_s >= longest_s:
        return longest_s
    return (alone_s + sqrt(alone_s * (alone_s + 4.0 * slowdown * computes_s))) / 2.0


def slowdowns(loads: Iterable[tuple[float, float]]) -> Iterator[float]:
    """By how much loads take longer beside iterations, by any two that had them for unlike shares
    of their time: of each its seconds, or a ratio, and that share.
    """
    for (one, more), (other, less) in combinations(sorted(loads, key=_share, reverse=True), 2):
        if more - less >= SHARES_APART:
            left = other * more - one * less
            slowdown = (one - other) / left if left > 0.0 else inf
            yield min(max(slowdown, 0.0), SLOWDOWN_MAX)


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


def _share(load: tuple[float, float]) -> float:
    return load[1]


def _distance(weights_bytes: int, load: PastLoad) -> float:
    return abs(log(max(weights_bytes, 1) / max(load.weights_bytes, 1)))


def _middle(weighed: Iterable[tuple[float, float]], whole: float) -> float:
    """The median of values with weights, which come to `whole`."""
    ordered = sorted(weighed)
    shares = accumulate(weight / whole for _, weight in ordered)
    return next(value for (value, _), share in zip(ordered, shares, strict=True) if share >= 0.5)
