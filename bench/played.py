"""What a live cell, or its peer, did under one load, and the figures that a scenario asks of it.

A figure is said by `MEASURE[.KEY] [REDUCTION] [/ NUMBER]`: a measure is an attribute of `Played`,
its judgement, its audit or its memory, and KEY one of its counts; a reduction is `mean`, `min`,
`max`, `last` or a percentile such as `p95`. A sequence without a reduction is counted. Pure.
Before: `live`. After: its report.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean

from bench.audit import Audit
from bench.judging import Judgement
from bench.overcommit_shapes import Resident
from bench.spans import Kind, Span, seconds_by_kind
from mesh.domain.errors import InvalidInput
from mesh.domain.outcome import Outcome
from mesh.domain.views import InstanceSnapshot
from mesh.evaluation.fidelity.report import LiveRun
from mesh.report.distribution import Distribution

_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]]
_REDUCTIONS = {"mean": fmean, "min": min, "max": max, "last": lambda values: values[-1]}
_SPEC = re.compile(r"(\w+)(?:\.(\w+))?(?: (mean|min|max|last|p\d\d?))?(?: / ([\d.]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of one load, or of several together."""

    judged: Judgement
    name: str = ""
    rate: float = 0.0
    """Calls a second, where the load has a rate."""
    surveyed: bool = False
    again: Judgement = field(default_factory=lambda: Judgement(()))
    """The judgement of the refused calls that came again."""
    spans: Sequence[Span] = ()
    """What the node did, from its journal."""
    seconds: float = 0.0
    """For how long calls came, where spans are known."""
    load_errors: tuple[float, ...] = ()
    """For each load, how far its expectation was off, as a share of what the load took."""
    instances: tuple[InstanceSnapshot, ...] = ()
    """As they were at the end, and loaded meanwhile."""
    offered: tuple[float, ...] = ()
    """For each round what was to compute, over what the node can, without best effort."""
    best_effort_shares: tuple[float, ...] = ()
    """For each round the tokens of best effort over those for which the rest had left time."""
    run: LiveRun | None = None
    """What a simulation is told of it, and of whom."""
    simulated_met_share: float | None = None
    loaded_seconds: float = 0.0
    """Seconds of instances while calls came and were answered."""
    instance_seconds: float = 0.0
    """The same without those that were parked."""
    ttft_forecast_errors: tuple[float, ...] = ()
    """For each load by how much the TTFT that a plan for its calls expected was off."""
    tpot_forecast_errors: tuple[float, ...] = ()
    forecasts_refused: int = 0
    """How many deployments were not planned for in a load, whose calls those errors are without."""
    audit: Audit = field(default_factory=Audit)
    resident: Resident = field(default_factory=lambda: Resident(limit_bytes=0))
    shapes: Mapping[str, float] = field(default_factory=dict)
    """What an instance of a shape is booked at, over what it takes."""

    def __add__(self, other: "Played") -> "Played":
        """What clients saw, and what loads took."""
        return replace(
            self,
            judged=self.judged + other.judged,
            again=self.again + other.again,
            load_errors=self.load_errors + other.load_errors,
            instances=self.instances + other.instances,
            offered=self.offered + other.offered,
            best_effort_shares=self.best_effort_shares + other.best_effort_shares,
            loaded_seconds=self.loaded_seconds + other.loaded_seconds,
            instance_seconds=self.instance_seconds + other.instance_seconds,
            ttft_forecast_errors=self.ttft_forecast_errors + other.ttft_forecast_errors,
            tpot_forecast_errors=self.tpot_forecast_errors + other.tpot_forecast_errors,
            forecasts_refused=self.forecasts_refused + other.forecasts_refused,
        )

    @property
    def _outcomes(self) -> list[Outcome]:
        return [each.outcome for each in self.judged.all]

    # By the clock: whatever callers were told.

    @property
    def met_by_the_clock(self) -> int:
        """TTFT and mean TPOT."""
        return sum(outcome.met_in_the_mean_without_grace for outcome in self._outcomes)

    @property
    def every_by_the_clock(self) -> int:
        """Each token by the TTFT limit and its index times the TPOT."""
        return sum(outcome.met_without_grace for outcome in self._outcomes)

    @property
    def met_share(self) -> float:
        return self.met_by_the_clock / max(self.judged.requests, 1)

    @property
    def met_every_token_share(self) -> float:
        return self.every_by_the_clock / max(self.judged.requests, 1)

    @property
    def both_of_admitted(self) -> float | None:
        """The share of the admitted that met both measures by the clock."""
        return _both([each.outcome for each in self.judged.admitted])

    @property
    def both_of_promised(self) -> float | None:
        """The same of those that were promised to be in time."""
        return _both(self.judged.promised)

    # By what callers were told.

    @property
    def met_of_promised(self) -> float | None:
        """Every token, of those promised to be in time; None where nobody was."""
        return self.judged.met_of_admitted if self.judged.promised else None

    @property
    def met_of_promised_in_the_mean(self) -> float | None:
        return self.judged.met_of_admitted_in_the_mean if self.judged.promised else None

    @property
    def told_late(self) -> int:
        """How many calls were told by how much a load would make them late."""
        return sum(outcome.grace_s > 0.0 for outcome in self._outcomes)

    @property
    def ttfts_s(self) -> list[float]:
        """The TTFT of each admitted call that has a first token."""
        ttfts_s = (each.outcome.ttft_s for each in self.judged.admitted)
        return [ttft_s for ttft_s in ttfts_s if ttft_s is not None]

    @property
    def tpots_s(self) -> list[float]:
        """The mean TPOT of each call that has two tokens."""
        return [outcome.tpot_s for outcome in self._outcomes if outcome.tpot_s is not None]

    @property
    def ended_by(self) -> dict[str, int]:
        """By node, the calls that it ended."""
        named = Counter(each.answer.node_id for each in self.judged.all if each.answer.node_id)
        return dict(sorted(named.items()))

    @property
    def lags_s(self) -> list[float]:
        """The client's own: by so much its times may be off."""
        return [each.answer.lag_s for each in self.judged.all]

    @property
    def again_admitted(self) -> float | None:
        """The share of those that came again; 0 where none did, `None` where none was refused."""
        if not self.judged.refused:
            return None
        return len(self.again.admitted) / max(self.again.requests, 1)

    @property
    def again_requests(self) -> int:
        return self.again.requests

    @property
    def met_by_deployment(self) -> dict[str, float]:
        """The share of the calls of each."""
        calls = Counter(outcome.deployment for outcome in self._outcomes)
        met = Counter(outcome.deployment for outcome in self._outcomes if outcome.met)
        return {name: met[name] / count for name, count in sorted(calls.items())}

    @property
    def met_with_limits(self) -> int:
        """How many calls met their SLO, without those of best effort."""
        return sum(outcome.met for outcome in self._outcomes if not outcome.slo.best_effort)

    @property
    def by_class(self) -> dict[str, Judgement]:
        """The calls of each class with limits."""
        limited = [each for each in self.judged.all if not each.call.slo.best_effort]
        names = sorted({each.call.slo.name for each in limited})
        return {
            name: Judgement(tuple(each for each in limited if each.call.slo.name == name))
            for name in names
        }

    @property
    def requests_by_class(self) -> dict[str, int]:
        return {name: of.requests for name, of in self.by_class.items()}

    @property
    def met_by_class(self) -> dict[str, int]:
        return {name: of.met for name, of in self.by_class.items()}

    @property
    def met_of_admitted_by_class(self) -> dict[str, float | None]:
        """Every token, of those promised to be in time; `None` where nobody was."""
        return {
            name: of.met_of_admitted if of.promised else None for name, of in self.by_class.items()
        }

    @property
    def met_jain(self) -> float:
        return jain(list(self.met_by_deployment.values()))

    # What the node did.

    @property
    def _from_s(self) -> float:
        first = self.judged.all[0]
        return first.answer.sent_s - first.answer.lag_s - first.call.at_s

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """The time in which calls came, by what the node spent it on."""
        return seconds_by_kind(self.spans, self._from_s, self._from_s + self.seconds)

    @property
    def loads_begun(self) -> int:
        until_s = self._from_s + self.seconds
        loads = [span for span in self.spans if span.kind is Kind.LOAD]
        return sum(self._from_s <= load.began_s < until_s for load in loads)

    @property
    def loading_s(self) -> float:
        """With a load under way, whatever was computed beside it."""
        loads = [span for span in self.spans if span.kind is Kind.LOAD]
        return seconds_by_kind(loads, self._from_s, self._from_s + self.seconds)[Kind.LOAD]

    @property
    def sim_difference(self) -> float | None:
        simulated = self.simulated_met_share
        return None if simulated is None else self.met_share - simulated

    @property
    def instance_errors(self) -> list[float]:
        """By what share of what a load took it was expected otherwise."""
        return [abs(i.load_s - i.load_expected_s) / i.load_s for i in self.instances]

    @property
    def tiers(self) -> dict[str, int]:
        """From where instances were loaded."""
        return dict(sorted(Counter(i.tier or "" for i in self.instances).items()))

    @property
    def ended_once(self) -> bool:
        """Every call, by its client and by the controller's journal."""
        return not self.judged.odd_ends and self.audit.ended_once


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _both(outcomes: Sequence[Outcome]) -> float | None:
    met = sum(o.met_without_grace and o.met_in_the_mean_without_grace for o in outcomes)
    return met / len(outcomes) if outcomes else None


_OWNERS = ("", "judged", "audit", "resident")
_KNOWN = {
    name
    for kind in (Played, Judgement, Audit, Resident)
    for name in (*(f.name for f in fields(kind)), *dir(kind))
    if not name.startswith("_")
}


def check_spec(spec: str) -> None:
    """Raises InvalidInput where it says no figure."""
    said = _SPEC.fullmatch(spec)
    if said is None or said[1] not in _KNOWN:
        raise InvalidInput(f"{spec!r} is no figure", hint="bench/played.py has all measures")


def measured(played: Played, spec: str) -> object:
    """A figure; floats have four digits. None where there is nothing to reduce."""
    said = _SPEC.fullmatch(spec)
    assert said is not None, "the file has been checked"
    name, key, reduction, divisor = said.groups()
    owners = (getattr(played, owner) if owner else played for owner in _OWNERS)
    value: object = next(getattr(o, name) for o in owners if hasattr(o, name))
    if isinstance(value, Mapping) and key:
        value = value.get(key, 0)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = _reduced(value, reduction)
    if divisor and isinstance(value, int | float):
        value = value / float(divisor)
    return _short(value)


def _reduced(values: Sequence[float], reduction: str | None) -> float | None:
    if reduction is None:
        return len(values)
    if not values:
        return None
    if reduction.startswith("p"):
        return Distribution.of(values).at(int(reduction[1:]))
    return _REDUCTIONS[reduction](values)


def _short(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {str(key): _short(each) for key, each in value.items()}
    return value
