"""What came of requests, as their callers saw it, and what that says of an SLO; pure.

A request meets its SLO when every token has come by `arrival + TTFT limit + index * TPOT`
(LLM-Mesh §3.1). Load time that its admission was granted (the grace) is told apart: the numbers are
given with it and without. Before: a cell, simulated or live. After: tables.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one request. Times are points on one clock, in seconds."""

    request_id: RequestId
    deployment: DeploymentName
    slo: Slo
    arrival_s: float
    input_tokens: int
    tokens_s: tuple[float, ...]
    """When each token came."""
    ended_s: float
    grace_s: float = 0.0
    end: FinishReason | RefusalReason

    @property
    def finished(self) -> bool:
        """It has all of its tokens."""
        return self.end in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def ttft_s(self) -> float | None:
        return self.tokens_s[0] - self.arrival_s if self.tokens_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None when there is none."""
        if len(self.tokens_s) < 2:
            return None
        return (self.tokens_s[-1] - self.tokens_s[0]) / (len(self.tokens_s) - 1)

    @property
    def late_s(self) -> float:
        """By how much its latest token was late, the grace left out; negative when none was."""
        first_due_s = self.arrival_s + self.slo.ttft_limit_s(self.input_tokens)
        tpot_s = self.slo.tpot_s
        late = (at_s - first_due_s - n * tpot_s for n, at_s in enumerate(self.tokens_s))
        return max(late, default=0.0)

    @property
    def met(self) -> bool:
        """Every token was in time, the grace granted."""
        return self.finished and self.late_s <= self.grace_s

    @property
    def met_without_grace(self) -> bool:
        return self.finished and self.late_s <= 0.0

    @property
    def met_in_the_mean(self) -> bool:
        """TTFT, the grace granted, and mean TPOT were: single tokens may have been late."""
        return self._met_in_the_mean(self.grace_s)

    @property
    def met_in_the_mean_without_grace(self) -> bool:
        return self._met_in_the_mean(0.0)

    def _met_in_the_mean(self, grace_s: float) -> bool:
        if not self.finished or self.ttft_s is None:
            return False
        limit_s = self.slo.ttft_limit_s(self.input_tokens) + grace_s
        return self.ttft_s <= limit_s and (self.tpot_s or 0.0) <= self.slo.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of all requests of a run. Counts, seconds and tokens."""

    requests: int
    finished: int
    met: int
    met_without_grace: int
    met_in_the_mean: int
    refused: tuple[tuple[str, int], ...]
    """All that did not finish, by reason; those that had tokens already, that were cancelled or
    that failed are among them.
    """
    output_tokens: int
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    tpot_s_mean: float | None


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    reasons = Counter(str(o.end) for o in outcomes if not o.finished)
    ttfts = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    tpots = [o.tpot_s for o in outcomes if o.tpot_s is not None]
    cuts = quantiles(ttfts, n=20, method="inclusive") if len(ttfts) > 1 else ttfts * 19
    return Summary(
        requests=len(outcomes),
        finished=sum(o.finished for o in outcomes),
        met=sum(o.met for o in outcomes),
        met_without_grace=sum(o.met_without_grace for o in outcomes),
        met_in_the_mean=sum(o.met_in_the_mean for o in outcomes),
        refused=tuple(sorted(reasons.items())),
        output_tokens=sum(len(o.tokens_s) for o in outcomes),
        ttft_s_p50=cuts[9] if cuts else None,
        ttft_s_p95=cuts[18] if cuts else None,
        tpot_s_mean=fmean(tpots) if tpots else None,
    )
