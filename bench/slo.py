"""Offers one node more than it can compute, in bursts, and counts who is served in time.

Under two policies, one after the other: `llm-mesh` admits what shadow validation lets pass and
computes by headroom; `fcfs` takes everything, in the order of arrival. Both get the same calls.
Both cells survey the model first, since its times say how much there is to do. Then llm-mesh gets
bursts of calls at once to one deployment of a cell as `mesh up` starts it; who is refused comes
again when told. `--bursts` is these alone, `--survey` has their cell surveyed as well.
The last line is one JSON object: `met_of_admitted` (those promised to be in time of which every
token was; `…_in_the_mean`: TTFT and mean TPOT) and all that has no prefix is llm-mesh's,
`met_ratio_to_fcfs` says in how many more calls it met the SLO, `offered_over_capacity` how much
there was to do. What begins with `burst_`, and all after it, is the bursts'. Exit code 1 when a
target was missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from bench import slo_bursts
from bench.cells import measured_profile
from bench.demo_model import stored_model
from bench.harness import Report, Table, show_status
from bench.slo_bursts import Burst, loaded_cell
from mesh.compute.times import Times
from mesh.domain.ids import DeploymentName
from mesh.domain.limits import CellLimits
from mesh.domain.slo import Slo
from mesh.evaluation import bursts as arriving
from mesh.evaluation.bursts import INPUT_TOKENS, OUTPUT_TOKENS, calls_of, request_s
from mesh.evaluation.judging import Judgement, judge
from mesh.evaluation.load_client import Call, offer

SLOS = {
    "slo-a": Slo(ttft_s=1.0, tpot_s=0.10),
    "slo-b": Slo(ttft_s=1.5, tpot_s=0.15),
    "slo-c": Slo(ttft_s=2.0, tpot_s=0.20),
    "slo-d": Slo(ttft_s=1.0, tpot_s=0.12),
}
"""By deployment; all of them are the demo model."""
CONTEXT_TOKENS = sum(INPUT_TOKENS) / 2 + sum(OUTPUT_TOKENS) / 4
"""The mean context of a call in its middle."""


class Costs:
    """Seconds of the node's compute time, by a measured profile."""

    def __init__(self, times: Times) -> None:
        self._times = times
        per_s = sum(1 / slo.tpot_s for slo in SLOS.values())
        batches = range(1, CellLimits().batch_max + 1)
        fitting = [b for b in batches if per_s * times.decode_s(b, CONTEXT_TOKENS) <= 1.0]
        self.batch = max(fitting, default=1)
        """The batch of every deployment when as many requests run as the SLOs allow."""

    def call_s(self, call: Call) -> float:
        """Its prompt, and its share of the decodes of a batch."""
        return request_s(self._times, len(call.prompt_tokens), call.output_tokens, self.batch)

    def calls(self, *, load: float, seconds: float, seed: int) -> list[Call]:
        """What is sent, in order: `load` times as much as the node can compute in `seconds`."""
        arrivals = arriving.bursts(
            tuple(SLOS), self._times, self.batch, seconds=seconds, load=load, seed=seed
        )
        return calls_of(arrivals, SLOS, seed)


def met_share_by_deployment(judged: Judgement) -> dict[str, float]:
    shares = {}
    for name in SLOS:
        mine = [each.outcome.met for each in judged.all if each.call.deployment == name]
        shares[name] = sum(mine) / max(len(mine), 1)
    return shares


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


OURS, BASELINE = "llm-mesh", "fcfs"
SECONDS = 90.0
QUICK_SECONDS = 15.0
LOAD = 2.0
TARGET = 0.995
"""The share of the admitted calls that is to be met, by either measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    ours: Judgement
    baseline: Judgement
    offered_over_capacity: float
    batch: int
    """The batch of every deployment, at capacity."""
    bursts: tuple[Burst, ...]
    bursts_surveyed: bool


def compare(seconds: float, rounds: int, seed: int, load: float, *, survey: bool) -> Compared:
    """Round by round, so that whatever else the machine does meets both policies."""
    ours = baseline = Judgement(())
    costs: Costs | None = None
    offered_s = 0.0
    for number in range(rounds):
        with loaded_cell(OURS, SLOS) as cell:
            profile = measured_profile(cell.address, DeploymentName(next(iter(SLOS))), show_status)
            costs = costs or Costs(Times(profile))
            sent = costs.calls(load=load, seconds=seconds, seed=seed + number)
            ours += _run(OURS, cell.address, sent)
        with loaded_cell(BASELINE, SLOS) as cell:
            baseline += _run(BASELINE, cell.address, sent)
        offered_s += sum(costs.call_s(call) for call in sent)
    assert costs is not None, "there is a round at least"
    return Compared(
        ours=ours,
        baseline=baseline,
        offered_over_capacity=offered_s / (rounds * seconds),
        batch=costs.batch,
        bursts=tuple(slo_bursts.offered(OURS, seed, show_status, survey=survey)),
        bursts_surveyed=survey,
    )


def _run(policy: str, address: str, sent: Sequence[Call]) -> Judgement:
    show_status(f"{policy}: {len(sent)} calls")
    return judge(sent, offer(address, sent))


def _rows(judged: Judgement, reasons: Sequence[str]) -> list[tuple[str, str]]:
    """What the table says of a policy. `reasons` are those for which any has refused a call."""
    shares = met_share_by_deployment(judged)
    return [
        ("admitted", str(len(judged.admitted))),
        ("  met their SLO, every token", f"{judged.met} ({judged.met_of_admitted:.1%})"),
        ("  TTFT and mean TPOT", f"{judged.met_of_admitted_in_the_mean:.1%}"),
        ("  late by, median s", f"{judged.late_s_p50:.3f}"),
        ("  late by, at most s", f"{max(judged.late_s, default=0.0):.3f}"),
        ("  late with the first token", str(judged.late_first)),
        ("  failed", str(sum(judged.failed.values()))),
        ("refused", str(len(judged.refused))),
        ("  before the first token was due", f"{judged.refusals_before_deadline:.1%}"),
        *((f"  {reason}", str(judged.refused_by_reason.get(reason, 0))) for reason in reasons),
        ("output tokens", str(judged.output_tokens)),
        ("client lag, p99 s", f"{judged.lag_s_p99:.3f}"),
        *(
            (f"met of {name}, TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s", f"{shares[name]:.1%}")
            for name, slo in SLOS.items()
        ),
    ]


def figures(compared: Compared) -> dict[str, object]:
    ours, baseline = compared.ours, compared.baseline
    shares = met_share_by_deployment(ours)
    return {
        "met_of_admitted": round(ours.met_of_admitted, 4),
        "met_of_admitted_in_the_mean": round(ours.met_of_admitted_in_the_mean, 4),
        "met_ratio_to_fcfs": round(_ratio(compared), 2),
        "requests": ours.requests,
        "admitted": len(ours.admitted),
        "met": ours.met,
        "refused_by_reason": ours.refused_by_reason,
        "refusals_before_deadline": round(ours.refusals_before_deadline, 4),
        "failed": ours.failed,
        "offered_over_capacity": round(compared.offered_over_capacity, 2),
        "late_s_p50": round(ours.late_s_p50, 4),
        "late_first": ours.late_first,
        "late_s_max": round(max(ours.late_s, default=0.0), 4),
        "met_share_by_deployment": {name: round(share, 3) for name, share in shares.items()},
        "met_share_jain": round(jain(list(shares.values())), 3),
        "client_lag_s_p99": round(ours.lag_s_p99, 4),
        "fcfs_met": baseline.met,
        "fcfs_admitted": len(baseline.admitted),
        "fcfs_met_of_admitted": round(baseline.met_of_admitted, 4),
        "fcfs_refused_by_reason": baseline.refused_by_reason,
        "fcfs_failed": baseline.failed,
        **slo_bursts.figures(compared.bursts),
        "burst_surveyed": compared.bursts_surveyed,
    }


def targets(compared: Compared) -> dict[str, bool]:
    """Whether each is reached."""
    ours = compared.ours
    return {
        "met_of_admitted": ours.met_of_admitted >= TARGET,
        "met_of_admitted_in_the_mean": ours.met_of_admitted_in_the_mean >= TARGET,
        **slo_bursts.targets(compared.bursts),
    }


def _ratio(compared: Compared) -> float:
    return compared.ours.met / max(compared.baseline.met, 1)


def report(compared: Compared) -> Report:
    ours, baseline = compared.ours, compared.baseline
    reasons = sorted({*ours.refused_by_reason, *baseline.refused_by_reason})
    both = zip(_rows(ours, reasons), _rows(baseline, reasons), strict=True)
    offered = (
        f"{ours.requests} calls in bursts: {compared.offered_over_capacity:.2f} times what a node "
        f"can compute, {compared.batch} calls of each deployment at once"
    )
    met = (
        f"SLO met: {ours.met_of_admitted:.1%} of the admitted, "
        f"{ours.met_of_admitted_in_the_mean:.1%} in the mean (≥ {TARGET:.1%}), "
        f"{_ratio(compared):.1f} times as many calls as under {BASELINE}"
    )
    table = Table(headings=("", OURS, BASELINE), rows=[(*mine, other) for mine, (_, other) in both])
    then = burst_report(compared.bursts, surveyed=compared.bursts_surveyed).shown
    return Report(
        figures=figures(compared),
        shown=(offered, table, met, "The model was surveyed for both policies.", *then),
        targets=targets(compared),
        surveyed=True,
    )


def burst_report(found: Sequence[Burst], *, surveyed: bool) -> Report:
    return Report(
        figures=slo_bursts.figures(found),
        shown=(
            slo_bursts.LEGEND,
            f"The cell is {'surveyed' if surveyed else 'as `mesh up` starts it'}.",
            Table(headings=slo_bursts.HEADINGS, rows=slo_bursts.rows(found)),
        ),
        targets=slo_bursts.targets(found),
        surveyed=surveyed,
    )


def run(
    *,
    seconds: float = SECONDS,
    rounds: Annotated[int, "rounds, each with both policies"] = 1,
    seed: int = 1,
    load: Annotated[float, "what is offered over what the node can compute"] = LOAD,
    quick: bool = False,
    survey: Annotated[bool, "survey before the bursts, too"] = False,
    bursts: Annotated[bool, "nothing but the bursts"] = False,
) -> Report:
    stored_model()
    if bursts:
        found = slo_bursts.offered(OURS, seed, show_status, survey=survey)
        return burst_report(found, surveyed=survey)
    seconds = QUICK_SECONDS if quick else seconds
    return report(compare(seconds, rounds, seed, load, survey=survey))
