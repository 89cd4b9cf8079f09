"""What came of all requests of a run, in counts and a few latencies; pure.

Before: outcomes, of a virtual cell, a live one or a journal. After: tables, JSON.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from statistics import fmean

from mesh.domain.deployment import DeploymentSpec, class_order
from mesh.domain.outcome import Outcome
from mesh.domain.values import dataclass, replace
from mesh.report.distribution import Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of all requests of a run, in counts, seconds and tokens."""

    requests: int
    finished: int
    met: int
    met_without_grace: int
    met_in_the_mean: int
    ttft_met: int
    tokens_in_time_share: float | None
    """In the mean over the requests; `None` where there are none."""
    refused: tuple[tuple[str, int], ...]
    """All that did not finish, by reason; those that had tokens already, that were cancelled or
    that failed are among them.
    """
    output_tokens: int
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    tpot_s_mean: float | None
    by_class: Mapping[str, "Summary"] = field(default_factory=dict)
    """The same of each SLO class; empty where requests have none."""


def classes_of(
    outcomes: Sequence[Outcome], specs: Iterable[DeploymentSpec]
) -> dict[str, list[Outcome]]:
    """The outcomes of each SLO class, in the order of `class_order`; requests without a class are
    left out.
    """
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.slo.name:
            found.setdefault(outcome.slo.name, []).append(outcome)
    return {name: found[name] for name in class_order(found, specs)}


def summarize(outcomes: Sequence[Outcome], specs: Iterable[DeploymentSpec] = ()) -> Summary:
    """`specs` are of the deployments."""
    by_class = {name: _summary(of) for name, of in classes_of(outcomes, specs).items()}
    return replace(_summary(outcomes), by_class=by_class)


def _summary(outcomes: Sequence[Outcome]) -> Summary:
    reasons = Counter(str(o.end) for o in outcomes if not o.finished)
    ttft = Distribution.of(o.ttft_s for o in outcomes)
    tpots = [o.tpot_s for o in outcomes if o.tpot_s is not None]
    return Summary(
        requests=len(outcomes),
        finished=sum(o.finished for o in outcomes),
        met=sum(o.met for o in outcomes),
        met_without_grace=sum(o.met_without_grace for o in outcomes),
        met_in_the_mean=sum(o.met_in_the_mean for o in outcomes),
        ttft_met=sum(o.ttft_met for o in outcomes),
        tokens_in_time_share=fmean(o.tokens_in_time_share for o in outcomes) if outcomes else None,
        refused=tuple(sorted(reasons.items())),
        output_tokens=sum(len(o.tokens_s) for o in outcomes),
        ttft_s_p50=ttft.at(50),
        ttft_s_p95=ttft.at(95),
        tpot_s_mean=fmean(tpots) if tpots else None,
    )
