"""When the requests of one function arrive: memoryless, in clusters, or in bursts with pauses.

A process has a rate and a known index of dispersion of counts (variance over mean in windows of
`window_s`; 1 is Poisson). All start in equilibrium, so that the expected count is rate times time
from the first second on. Only `random()` is drawn, whose sequence Python guarantees by seed.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from mesh.domain.errors import InvalidInput

DISPERSION_MAX = 10_000.0
PERIOD_S_MAX = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """A renewal process with hyperexponential gaps (two phases, balanced means): short gaps within
    clusters, long ones between. 1 is a Poisson process.

    `dispersion` is the squared coefficient of variation of the gaps, and the index of dispersion of
    counts in windows much longer than a gap (D. R. Cox, "Renewal Theory", §4.2).
    """

    dispersion: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.dispersion <= DISPERSION_MAX:
            raise InvalidInput(
                f"dispersion is {self.dispersion:g}; it must be from 1 to {DISPERSION_MAX:g}"
            )

    def times(self, rate_per_s: float, until_s: float, draw: random.Random) -> Iterator[float]:
        """Ascending, from 0 to below `until_s`."""
        often = (1 + math.sqrt((self.dispersion - 1) / (self.dispersion + 1))) / 2
        # By time, not by gaps, both phases are equally likely: their means are balanced.
        share = 0.5
        at_s = 0.0
        while True:
            phase = often if draw.random() < share else 1 - often
            at_s += _exponential(2 * phase * rate_per_s, draw)
            if at_s >= until_s:
                return
            yield at_s
            share = often

    def index_of_dispersion(self, rate_per_s: float, window_s: float) -> float:
        """The index of dispersion of counts in windows of this length; it is near `dispersion` in
        windows of many gaps.
        """
        windows = window_s * 2 * rate_per_s / (self.dispersion + 1)
        return 1 + (self.dispersion - 1) * (1 + math.expm1(-windows) / windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """An interrupted Poisson process: requests come only while it is on, faster by 1 / duty.

    On for `on_s` on average, off for `on_s * (1 - duty) / duty`, both exponential.
    """

    duty: float
    """Share of the time that it is on."""
    on_s: float

    def __post_init__(self) -> None:
        if not 0.001 <= self.duty < 1:
            raise InvalidInput(f"duty is {self.duty:g}; it must be from 0.001 and below 1")
        if not 0.001 <= self.on_s <= PERIOD_S_MAX:
            raise InvalidInput(f"on_s is {self.on_s:g}; it must be from 0.001 to {PERIOD_S_MAX:g}")

    def times(self, rate_per_s: float, until_s: float, draw: random.Random) -> Iterator[float]:
        """Ascending, from 0 to below `until_s`."""
        off_s = self.on_s * (1 - self.duty) / self.duty
        at_s = 0.0
        if draw.random() >= self.duty:
            at_s += _exponential(1 / off_s, draw)
        while at_s < until_s:
            end_s = min(until_s, at_s + _exponential(1 / self.on_s, draw))
            while (at_s := at_s + _exponential(rate_per_s / self.duty, draw)) < end_s:
                yield at_s
            at_s = end_s + _exponential(1 / off_s, draw)

    def index_of_dispersion(self, rate_per_s: float, window_s: float) -> float:
        """The index of dispersion of counts in windows of this length (H. Heffes, D. M. Lucantoni,
        "A Markov Modulated Characterization of Packetized Voice and Data Traffic", JSAC 1986, with
        one rate 0).
        """
        relaxing_s = self.on_s * (1 - self.duty)
        limit = 2 * rate_per_s * self.on_s * (1 - self.duty) ** 2 / self.duty
        windows = window_s / relaxing_s
        return 1 + limit * (1 + math.expm1(-windows) / windows)


Process = Clustered | OnOff
POISSON = Clustered(dispersion=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """The rate swings around its mean: rate * (1 + swing * sin(2 pi (t / period_s + phase)))."""

    swing: float = 0.0
    """From 0 (none) to below 1."""
    period_s: float = 24 * 3600.0
    phase: float = 0.0
    """The phase at the trace's start, as a share of a period."""

    def __post_init__(self) -> None:
        if not 0 <= self.swing < 1:
            raise InvalidInput(f"swing is {self.swing:g}; it must be from 0 and below 1")
        if not 1 <= self.period_s <= PERIOD_S_MAX:
            raise InvalidInput(
                f"period_s is {self.period_s:g}; it must be from 1 to {PERIOD_S_MAX:g}"
            )
        if not 0 <= self.phase <= 1:
            raise InvalidInput(f"phase is {self.phase:g}; it must be from 0 to 1")

    def passed_s(self, t_s: float) -> float:
        """Time as a clock shows it that runs as fast as the rate: the integral of the factor."""
        turn = 2 * math.pi / self.period_s
        start = 2 * math.pi * self.phase
        return t_s + self.swing / turn * (math.cos(start) - math.cos(turn * t_s + start))

    def when_s(self, passed_s: float) -> float:
        """The inverse of `passed_s`, to a microsecond."""
        reach_s = self.swing * self.period_s / math.pi
        low_s, high_s = passed_s - reach_s, passed_s + reach_s
        while high_s - low_s > 1e-6:
            middle_s = (low_s + high_s) / 2
            if self.passed_s(middle_s) < passed_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return max(0.0, (low_s + high_s) / 2)


STEADY = Diurnal()


def _exponential(rate_per_s: float, draw: random.Random) -> float:
    return -math.log(1.0 - draw.random()) / rate_per_s
