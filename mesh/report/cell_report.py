"""What a cell did within a span of time, as a value: of a live cell, a simulated or a replayed one.

It is made of how calls ended, of loads, of looks at the nodes and of lines that tell of faults.
Pure. Before: `calls` and whoever has outcomes. After: JSON, and `cell_page`, which draws it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from statistics import fmean

from mesh.domain.deployment import DeploymentSpec, class_order
from mesh.domain.reasons import FinishReason
from mesh.domain.recent import CellGauges
from mesh.domain.values import dataclass
from mesh.domain.views import CellLine, CellSnapshot
from mesh.report.calls import CallEnd, Load
from mesh.report.distribution import Distribution
from mesh.report.memory_parts import gauges
from mesh.runtime.turns import at_once

ALL = "all"
LOOKS_MAX = 240
"""At most so many points of a line over time."""
FAULTS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsReport:
    """The calls of one deployment, or of all. Shares are of the `judged`."""

    deployment: str
    calls: int
    finished: int
    judged: int
    """The calls that nobody cancelled: a refused one has missed its SLO."""
    met: int
    """How many have every token in time, or late by no more than was told."""
    met_in_the_mean: int
    refused: Mapping[str, int]
    """The refused calls by reason, the most frequent first."""
    prompt_tokens: int
    output_tokens: int
    attainment: float | None
    attainment_in_the_mean: float | None
    ttft_count: int
    """How many have a first token, and below how many have a second."""
    tpot_count: int
    ttft_s: tuple[float, ...]
    """Percentiles from 0 to 100; empty without a token. The same holds for `tpot_s`."""
    tpot_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsReport:
    """The loads from one tier; those that failed have none."""

    tier: str
    loads: int
    mean_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The nodes at one time, in seconds from the span's beginning."""

    at_s: float
    gauges: CellGauges


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    subject: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """`calls` begins with all deployments together; times count from the span's beginning."""

    name: str
    began_unix_s: float | None = None
    """`None` of a virtual cell."""
    span_s: float
    calls: tuple[CallsReport, ...]
    by_class: Mapping[str, CallsReport] = field(default_factory=dict)
    """The calls to all deployments, by their SLO class; empty where they have none."""
    loads: tuple[LoadsReport, ...] = ()
    looks: tuple[Look, ...] = ()
    faults: tuple[Fault, ...] = ()
    faults_left_out: int = 0


def cell_report(
    name: str,
    ends: Iterable[CallEnd],
    *,
    from_s: float,
    until_s: float,
    specs: Iterable[DeploymentSpec] = (),
    loads: Iterable[Load] = (),
    looks: Sequence[tuple[float, CellGauges]] = (),
    lines: Iterable[tuple[float, CellLine]] = (),
    began_unix_s: float | None = None,
) -> CellReport:
    """All times on one clock; what ended, was looked at or said before `from_s` is left out."""
    within = [end for end in ends if from_s <= end.at_s <= until_s]
    groups: dict[str, list[CallEnd]] = {}
    classes: dict[str, list[CallEnd]] = {}
    for end in within:
        groups.setdefault(end.deployment, []).append(end)
        if end.slo_class:
            classes.setdefault(end.slo_class, []).append(end)
    faults = [
        Fault(at_s=at_s - from_s, subject=line.subject, text=line.text)
        for at_s, line in lines
        if at_s >= from_s and line.fault
    ]
    shown = [look for look in looks if look[0] >= from_s]
    step = -(-len(shown) // LOOKS_MAX) or 1
    return CellReport(
        name=name,
        began_unix_s=began_unix_s,
        span_s=until_s - from_s,
        calls=(_calls(ALL, within), *(_calls(one, groups[one]) for one in sorted(groups))),
        by_class={one: _calls(ALL, classes[one]) for one in class_order(classes, specs)},
        loads=_loads([load for load in loads if (load.ended_s or -1.0) >= from_s]),
        looks=tuple(Look(at_s=at_s - from_s, gauges=seen) for at_s, seen in shown[::step]),
        faults=tuple(faults[-FAULTS_MAX:]),
        faults_left_out=max(len(faults) - FAULTS_MAX, 0),
    )


def _calls(name: str, ends: Sequence[CallEnd]) -> CallsReport:
    judged = [end for end in ends if end.end != FinishReason.CANCELLED]
    met, mean = sum(e.met for e in judged), sum(e.met_in_the_mean for e in judged)
    refused = Counter(end.end for end in ends if end.refused)
    ttft = Distribution.of(end.ttft_s for end in judged)
    tpot = Distribution.of(end.tpot_s for end in judged)
    return CallsReport(
        deployment=name,
        calls=len(ends),
        finished=sum(end.finished for end in ends),
        judged=len(judged),
        met=met,
        met_in_the_mean=mean,
        refused=dict(sorted(refused.items(), key=lambda one: (-one[1], one[0]))),
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        output_tokens=sum(end.output_tokens for end in ends),
        attainment=met / len(judged) if judged else None,
        attainment_in_the_mean=mean / len(judged) if judged else None,
        ttft_count=ttft.count,
        tpot_count=tpot.count,
        ttft_s=ttft.seconds,
        tpot_s=tpot.seconds,
    )


def _loads(loads: Sequence[Load]) -> tuple[LoadsReport, ...]:
    spans: dict[str, list[float]] = {}
    for load in loads:
        if load.ended_s is not None:
            spans.setdefault(load.tier or "failed", []).append(load.ended_s - load.begun_s)
    return tuple(
        LoadsReport(tier=tier, loads=len(each), mean_s=fmean(each))
        for tier, each in sorted(spans.items())
    )


@dataclass(slots=True, eq=False)
class Looks:
    """A recorder that looks at the nodes once in `every_s`, whenever something is decided then.
    `snapshot` is the core's.
    """

    every_s: float
    seen: list[tuple[float, CellGauges]] = field(default_factory=list)
    snapshot: Callable[[float], CellSnapshot] | None = None

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        due = not self.seen or now_s - self.seen[-1][0] >= self.every_s
        if self.snapshot is not None and due:
            self.seen.append((now_s, at_once(gauges(self.snapshot(now_s).nodes))))
