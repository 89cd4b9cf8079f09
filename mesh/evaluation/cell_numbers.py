"""One run of a cell of the evaluation in numbers: SLO, nodes in use, latencies, refusals; pure.

`met` is the paper's: TTFT and mean TPOT within their limits, the time of a load included, a refused
request counts as missed. `met_every_token` is mesh's own: every token by arrival + TTFT
limit + index * TPOT. Before: outcomes and node series. After: tables, charts, JSON.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.energy import NO_ENERGY, EnergyView
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import DeviceKind
from mesh.domain.values import dataclass
from mesh.evaluation.series import NodeSeries, nodes_busy, nodes_in_use
from mesh.evaluation.summary import classes_of
from mesh.report.distribution import Distribution

GROUPS_MAX = 16
SERVED_LEAST, SERVED_MOST = 0.4, 0.9
"""In overload no deployment is to be served less than the first share while another is served more
than the second.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Functions of neighbouring ranks, and what came of their requests."""

    first_rank: int
    last_rank: int
    requests: int
    met: int
    """TTFT without any grace, and mean TPOT."""
    not_finished: int
    cold_requests: int


def by_rank(outcomes: Sequence[Outcome]) -> tuple[RankGroup, ...]:
    """Groups of as many functions each as can be, busiest first; functions without requests have
    no rank.
    """
    counts = Counter(outcome.deployment for outcome in outcomes)
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    groups = min(GROUPS_MAX, len(ranked))
    cuts = [len(ranked) * n // groups for n in range(groups + 1)] if groups else []
    group_of = {
        name: group for group in range(groups) for name in ranked[cuts[group] : cuts[group + 1]]
    }
    members: list[list[Outcome]] = [[] for _ in range(groups)]
    for outcome in outcomes:
        members[group_of[outcome.deployment]].append(outcome)
    return tuple(
        RankGroup(
            first_rank=cuts[group] + 1,
            last_rank=cuts[group + 1],
            requests=len(mine),
            met=sum(o.met_in_the_mean_without_grace for o in mine),
            not_finished=sum(not o.finished for o in mine),
            cold_requests=sum(o.grace_s > 0 for o in mine),
        )
        for group, mine in enumerate(members)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShares:
    """The shares of their requests that deployments got all tokens of; 1 without any."""

    least: float
    most: float
    unfair_pairs: int
    """Pairs of a deployment below SERVED_LEAST and one above SERVED_MOST."""


def served_shares(outcomes: Sequence[Outcome]) -> ServedShares:
    """Deployments without requests have no share."""
    called = Counter(o.deployment for o in outcomes)
    finished = Counter(o.deployment for o in outcomes if o.finished)
    shares = [finished[name] / count for name, count in called.items()]
    below = sum(share < SERVED_LEAST for share in shares)
    above = sum(share > SERVED_MOST for share in shares)
    return ServedShares(
        least=min(shares, default=1.0), most=max(shares, default=1.0), unfair_pairs=below * above
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassNumbers:
    """What came of the requests of one SLO class: fields as in `CellNumbers`."""

    requests: int
    met: int
    met_every_token: int
    refused: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellNumbers:
    """Counts are of requests, unless named otherwise; means are over the workload's time."""

    requests: int
    finished: int
    met: int
    met_with_grace: int
    """What only a load made late may be late by as much as it was told."""
    met_every_token: int
    met_every_token_with_grace: int
    cpu_nodes: float
    """Mean number in use: with resident weights, where those count."""
    gpu_nodes: float
    cpu_nodes_busy: float
    """Mean number by the paper's measure, which does not know resident weights."""
    gpu_nodes_busy: float
    loads: int
    """How many instances were loaded (cold starts); parked ones that resume do not count."""
    cold_requests: int
    """How many requests were told that they would be late because of a load."""
    refused: tuple[tuple[str, int], ...]
    """All that did not finish, by reason: see `summary.Summary`."""
    decode_tokens_per_s: tuple[tuple[str, float], ...]
    """By kind of device, of one node while it is busy; none for a kind that never was."""
    ttft: Distribution
    """The TTFT of the requests that had a first token."""
    tpot: Distribution
    """Mean time of a token after the first, of the requests that had two."""
    by_rank: tuple[RankGroup, ...]
    by_class: Mapping[str, ClassNumbers]
    """Empty where requests have no SLO class."""
    served: ServedShares
    energy: EnergyView
    """What all nodes took until the end of the load's time, or of its last request."""


def cell_numbers(
    outcomes: Sequence[Outcome],
    nodes: Sequence[NodeSeries],
    energy: EnergyView = NO_ENERGY,
    specs: Iterable[DeploymentSpec] = (),
) -> CellNumbers:
    """All outcomes of a run, the series of all nodes over its time, the specs of deployments."""
    late = [(o, o.late_s) for o in outcomes if o.finished]
    busy = {device: nodes_busy(nodes, device) for device in DeviceKind}
    return CellNumbers(
        requests=len(outcomes),
        finished=len(late),
        met=sum(o.met_in_the_mean_without_grace for o in outcomes),
        met_with_grace=sum(o.met_in_the_mean for o in outcomes),
        met_every_token=sum(late_s <= 0.0 for _, late_s in late),
        met_every_token_with_grace=sum(late_s <= o.grace_s for o, late_s in late),
        cpu_nodes=_mean(nodes_in_use(nodes, DeviceKind.CPU)),
        gpu_nodes=_mean(nodes_in_use(nodes, DeviceKind.GPU)),
        cpu_nodes_busy=_mean(busy[DeviceKind.CPU]),
        gpu_nodes_busy=_mean(busy[DeviceKind.GPU]),
        loads=sum(sum(node.loads) for node in nodes),
        cold_requests=sum(o.grace_s > 0 for o in outcomes),
        refused=_refused(outcomes),
        decode_tokens_per_s=tuple(_decoding(nodes, busy)),
        ttft=Distribution.of(o.ttft_s for o in outcomes),
        tpot=Distribution.of(o.tpot_s for o in outcomes),
        by_rank=by_rank(outcomes),
        by_class={
            name: ClassNumbers(
                requests=len(mine),
                met=sum(o.met_in_the_mean_without_grace for o in mine),
                met_every_token=sum(o.met_without_grace for o in mine),
                refused=_refused(mine),
            )
            for name, mine in classes_of(outcomes, specs).items()
        },
        served=served_shares(outcomes),
        energy=energy,
    )


def _refused(outcomes: Sequence[Outcome]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(str(o.end) for o in outcomes if not o.finished).items()))


def _decoding(
    nodes: Sequence[NodeSeries], busy: dict[DeviceKind, tuple[float, ...]]
) -> list[tuple[str, float]]:
    return [
        (device.value, sum(sum(n.decoded_tokens) for n in nodes if n.device is device) / busy_s)
        for device in DeviceKind
        if (busy_s := sum(busy[device])) > 0
    ]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
