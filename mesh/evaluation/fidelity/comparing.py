"""A live run and simulations of it, request by request; pure.

Latencies are compared over the requests that finished on both sides, refusals over all. An error is
|simulated - live| / live. Single iterations decide whom admission lets in, so a run is one of many
that might have been: the figures are those of several simulations together. Before: outcomes of
both sides, in the order of the arrivals. After: tables.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

from mesh.domain.errors import InvalidInput
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import dataclass
from mesh.report.distribution import Distribution

TPOT_ERROR_MAX = 0.03
E2E_ERROR_MAX = 0.03
TTFT_P95_ERROR_MAX = 0.10
REFUSED_ERROR_MAX = 0.05
COMPARED_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure of both sides."""

    live: float
    simulated: float

    @property
    def error(self) -> float:
        """Infinite where there was nothing live."""
        if self.live == self.simulated:
            return 0.0
        return abs(self.simulated - self.live) / self.live if self.live else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Counts of requests are means over the simulations."""

    simulations: int
    requests: int
    finished_in_both: float
    tpot_s: Pair
    """Mean over requests of more than one token."""
    e2e_s: Pair
    """Mean, from sending to the last token."""
    ttft_s_p95: Pair
    refused: Pair
    """Requests."""
    met: Pair
    """Requests with every token in time, loads granted."""
    same_end: float
    """Requests that finished on both sides, or on neither."""

    @property
    def refused_share_error(self) -> float:
        """Difference of both sides, as a share of the requests."""
        return abs(self.refused.simulated - self.refused.live) / self.requests

    @property
    def within_targets(self) -> bool:
        return (
            self.tpot_s.error <= TPOT_ERROR_MAX
            and self.e2e_s.error <= E2E_ERROR_MAX
            and self.ttft_s_p95.error <= TTFT_P95_ERROR_MAX
            and self.refused.error <= REFUSED_ERROR_MAX
        )


def compare(
    live: Sequence[Outcome], simulations: Sequence[Sequence[Outcome]], *, from_s: float = 0.0
) -> Comparison:
    """Compares the requests that were sent live at `from_s` or later.

    Raises InvalidInput when too few finished on both sides.
    """
    count = len(simulations)
    pairs = [
        (a, b)
        for simulated in simulations
        for a, b in zip(live, simulated, strict=True)
        if a.arrival_s >= from_s
    ]
    both = [(a, b) for a, b in pairs if a.finished and b.finished]
    several = [(a, b) for a, b in both if a.tpot_s is not None and b.tpot_s is not None]
    if min(len(both), len(several)) < COMPARED_MIN:
        raise InvalidInput(
            f"{len(both)} of {len(pairs)} requests finished on both sides: too few to compare",
            hint="run for longer, or with less load",
        )
    return Comparison(
        simulations=count,
        requests=len(pairs) // count,
        finished_in_both=len(both) / count,
        tpot_s=_pair(several, lambda side: fmean(o.tpot_s or 0.0 for o in side)),
        e2e_s=_pair(both, lambda side: fmean(o.ended_s - o.arrival_s for o in side)),
        ttft_s_p95=_pair(both, _ttft_s_p95),
        refused=_pair(
            pairs, lambda side: sum(isinstance(o.end, RefusalReason) for o in side) / count
        ),
        met=_pair(pairs, lambda side: sum(o.met for o in side) / count),
        same_end=sum(a.finished == b.finished for a, b in pairs) / count,
    )


def _pair(
    pairs: Sequence[tuple[Outcome, Outcome]], figure: Callable[[Sequence[Outcome]], float]
) -> Pair:
    return Pair(live=figure([a for a, _ in pairs]), simulated=figure([b for _, b in pairs]))


def _ttft_s_p95(side: Sequence[Outcome]) -> float:
    return Distribution.of(o.ttft_s or 0.0 for o in side).at(95) or 0.0
