"""A replay in numbers, by deployment and in all; pure.

SLO attainment is told both ways: every token in time, and TTFT with mean TPOT; a call that was told
to be late may be late by that much, and is counted without that, too. Shares are of the calls that
were sent and not ended from outside: a refused one has missed. Before: `results`. After: tables,
JSON, the page.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from mesh.domain.values import dataclass
from mesh.evaluation.replay.results import CallResult
from mesh.report.distribution import Distribution

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayNumbers:
    """Counts of calls, seconds and tokens."""

    deployment: str
    """The deployment's name, or `all` for all deployments together."""
    calls: int
    finished: int
    refused: tuple[tuple[str, int], ...]
    """The refused calls by reason."""
    failed: tuple[tuple[str, int], ...]
    """The failed calls by status, `not_sent` among them: too many were open."""
    cancelled: int
    """The calls that were open when the replay was stopped."""
    judged: int
    """The calls that attainment is a share of."""
    met: int
    met_without_grace: int
    met_in_the_mean: int
    met_in_the_mean_without_grace: int
    promised: int
    """How many calls were admitted and not told to be late."""
    promised_met: int
    promised_met_in_the_mean: int
    told_late: int
    """How many calls were admitted and told by how much their first token would be late."""
    late_over_told_p50: float | None
    """By how much it was late, over what they were told."""
    late_over_told_p95: float | None
    input_tokens: int
    """The prompt tokens that were sent."""
    output_tokens: int
    tokens_per_s: float
    """The rate of output tokens, from the first call's sending to the last one's end."""
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    tpot_s_p50: float | None
    tpot_s_p95: float | None
    whole_s_p50: float | None
    """From sending to the last token, of those that finished."""
    whole_s_p95: float | None
    late_ms_p50: float
    """By how much the client sent calls after their time."""
    late_ms_p99: float

    @property
    def attainment(self) -> float:
        """Every token in time."""
        return self.met / self.judged if self.judged else 0.0

    @property
    def attainment_in_the_mean(self) -> float:
        return self.met_in_the_mean / self.judged if self.judged else 0.0

    @property
    def met_of_admitted(self) -> float | None:
        """Every token in time, of those promised to be; None where nothing was promised."""
        return self.promised_met / self.promised if self.promised else None

    @property
    def met_of_admitted_in_the_mean(self) -> float | None:
        return self.promised_met_in_the_mean / self.promised if self.promised else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNumbers:
    """The counts of one of the several processes that send a replay's calls."""

    worker: str
    calls: int
    """How many calls it was to send."""
    ended: int
    """For how many of them the worker has said what came of them."""
    late_ms_p50: float
    late_ms_p99: float
    late_ms_max: float


def numbers(results: Sequence[CallResult], names: Iterable[str]) -> tuple[ReplayNumbers, ...]:
    """All first, then each deployment by name."""
    span_s = _span_s(results)
    groups: dict[str, list[CallResult]] = {name: [] for name in names}
    for result in results:
        groups[result.call.deployment].append(result)
    each = [numbers_of(name, group, span_s) for name, group in sorted(groups.items())]
    return (numbers_of(ALL, results, span_s), *each)


def numbers_of(name: str, results: Sequence[CallResult], span_s: float) -> ReplayNumbers:
    judged = [r.outcome for r in results if r.judged]
    promised = [o for o in judged if o.promised_in_time]
    over_told = Distribution.of(o.late_over_told for o in judged)
    ttft = Distribution.of(o.ttft_s for o in judged)
    tpot = Distribution.of(o.tpot_s for o in judged)
    whole = Distribution.of(o.ended_s - o.arrival_s for o in judged if o.finished)
    late = Distribution.of(1000 * r.late_s for r in results if r.sent)
    output_tokens = sum(len(r.outcome.tokens_s) for r in results)
    return ReplayNumbers(
        deployment=name,
        calls=len(results),
        finished=sum(o.finished for o in judged),
        refused=_counted(r.refused for r in results),
        failed=_counted(r.failed or "torn" for r in results if r.broke),
        cancelled=sum(r.cancelled for r in results),
        judged=len(judged),
        met=sum(o.met for o in judged),
        met_without_grace=sum(o.met_without_grace for o in judged),
        met_in_the_mean=sum(o.met_in_the_mean for o in judged),
        met_in_the_mean_without_grace=sum(o.met_in_the_mean_without_grace for o in judged),
        promised=len(promised),
        promised_met=sum(o.met for o in promised),
        promised_met_in_the_mean=sum(o.met_in_the_mean for o in promised),
        told_late=sum(o.grace_s > 0.0 for o in judged),
        late_over_told_p50=over_told.at(50),
        late_over_told_p95=over_told.at(95),
        input_tokens=sum(r.call.input_tokens for r in results if r.sent),
        output_tokens=output_tokens,
        tokens_per_s=output_tokens / span_s if span_s else 0.0,
        ttft_s_p50=ttft.at(50),
        ttft_s_p95=ttft.at(95),
        tpot_s_p50=tpot.at(50),
        tpot_s_p95=tpot.at(95),
        whole_s_p50=whole.at(50),
        whole_s_p95=whole.at(95),
        late_ms_p50=late.at(50) or 0.0,
        late_ms_p99=late.at(99) or 0.0,
    )


def worker_numbers(worker: str, calls: int, results: Sequence[CallResult]) -> WorkerNumbers:
    late = Distribution.of(1000 * r.late_s for r in results if r.sent)
    return WorkerNumbers(
        worker=worker,
        calls=calls,
        ended=len(results),
        late_ms_p50=late.at(50) or 0.0,
        late_ms_p99=late.at(99) or 0.0,
        late_ms_max=late.at(100) or 0.0,
    )


def _span_s(results: Sequence[CallResult]) -> float:
    sent = [r.outcome for r in results if r.sent]
    if not sent:
        return 0.0
    return max(o.ended_s for o in sent) - min(o.arrival_s for o in sent)


def _counted(words: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(word for word in words if word).items()))
