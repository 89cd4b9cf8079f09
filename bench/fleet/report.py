"""What the benchmark shows: a row a rate and system, and the same in one JSON object."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.fleet.seconds import Kind
from bench.fleet.workload import Scene
from bench.printing import last_line, rounded, show_table
from mesh.cli.output import text
from mesh.evaluation.distribution import Distribution
from mesh.evaluation.judging import Judgement

HEADINGS = (
    *("calls/s", "met", "every", "taken", "p50 s", "p95 s"),
    *("loads, s", "load", "unload", "first", "prefill", "decode", "idle", "sim"),
)
LEGEND = (
    "met: share of all calls with TTFT and mean TPOT in time; every: with every token. taken: not "
    "refused; p50, p95: their TTFT. loads: how many, in so many seconds. load to idle: where the "
    "seconds went; load: while nothing was computed, first: runs of new instances for nobody. "
    "sim: met, simulated"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One system under one rate, by its clients' clock."""

    rate: float
    judged: Judgement
    seconds: dict[str, float]
    """The time in which calls came, by what the node spent it on."""
    loads: int
    """That began in it."""
    loading_s: float
    """With a load under way, whatever was computed beside it."""
    simulated_met_share: float | None = None
    load_errors: tuple[float, ...] = ()
    """For each load, how far its expectation was off, as a share of what the load took; only mesh
    has any.
    """

    @property
    def met(self) -> int:
        """TTFT and mean TPOT."""
        return sum(j.outcome.met_in_the_mean_without_grace for j in self.judged.all)

    @property
    def met_share(self) -> float:
        return self.met / self.judged.requests

    @property
    def met_every_token_share(self) -> float:
        """Each token by the TTFT limit and its index times the TPOT."""
        met = sum(j.outcome.met_without_grace for j in self.judged.all)
        return met / self.judged.requests

    @property
    def told_late(self) -> int:
        """How many calls were admitted and told by how much a load would make them late."""
        return len(self.judged.admitted) - len(self.judged.promised)

    @property
    def met_of_admitted(self) -> float | None:
        """TTFT and mean TPOT, of those promised to be in time."""
        return self.judged.met_of_admitted_in_the_mean if self.judged.promised else None

    @property
    def met_every_token_of_admitted(self) -> float | None:
        """The share of calls in which every token was in time, among those that were promised to
        be.
        """
        return self.judged.met_of_admitted if self.judged.promised else None

    def ttft_s(self, percent: int) -> float | None:
        """A percentile over the admitted that have a first token."""
        ttfts_s = (j.outcome.ttft_s for j in self.judged.admitted)
        return Distribution.of(ttft_s for ttft_s in ttfts_s if ttft_s is not None).at(percent)

    @property
    def sim_difference(self) -> float | None:
        simulated = self.simulated_met_share
        return None if simulated is None else self.met_share - simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A scene, by rate. There is no peer where none was asked for."""

    scene: Scene
    ours: tuple[Measured, ...]
    peer: tuple[Measured, ...] = ()


def report(played: Sequence[Played], *, surveyed: bool) -> None:
    text(LEGEND)
    for each in played:
        scene, slo = each.scene, each.scene.slo
        text(
            f"{scene.name}: {scene.deployments} deployments, memory for {scene.resident_max}; "
            f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s, by the clock"
        )
        named = [("mesh", one) for one in each.ours] + [("peer", one) for one in each.peer]
        by_rate = sorted(named, key=lambda pair: pair[1].rate)
        show_table(HEADINGS, [_row(name, one) for name, one in by_rate])
        for one in each.ours:
            if reasons := one.judged.refused_by_reason:
                words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                text(f"refused at {one.rate:g} calls/s: {words}")
    text(f"The cells are {'surveyed' if surveyed else 'as `mesh up` starts them'}.")
    last_line(figures(played), surveyed=surveyed)


def _row(name: str, one: Measured) -> tuple[str, ...]:
    return (
        f"{one.rate:g} {name}",
        f"{one.met_share:.2f}",
        f"{one.met_every_token_share:.2f}",
        f"{len(one.judged.admitted)}/{one.judged.requests}",
        *("" if s is None else f"{s:.2f}" for s in (one.ttft_s(50), one.ttft_s(95))),
        f"{one.loads} in {one.loading_s:.0f}",
        *(
            f"{one.seconds[kind]:.0f}"
            for kind in (
                *(Kind.LOAD, Kind.UNLOAD, Kind.FIRST_RUN),
                *(Kind.PREFILL, Kind.DECODE, Kind.IDLE),
            )
        ),
        "" if one.simulated_met_share is None else f"{one.simulated_met_share:.2f}",
    )


def figures(played: Sequence[Played]) -> dict[str, object]:
    """Lists are by rate; their names say of which scene they are, but for the first."""
    found: dict[str, object] = {}
    for each in played:
        mark = each.scene.mark
        ours, peer = each.ours, each.peer
        found |= {
            f"{mark}rates": [one.rate for one in ours],
            f"{mark}met_share": [rounded(one.met_share) for one in ours],
            f"{mark}met_every_token_share": [rounded(one.met_every_token_share) for one in ours],
            f"{mark}ttft_s_p95": [rounded(one.ttft_s(95)) for one in ours],
            f"{mark}met_of_admitted": [rounded(one.met_of_admitted) for one in ours],
            f"{mark}met_every_token_of_admitted": [
                rounded(one.met_every_token_of_admitted) for one in ours
            ],
            f"{mark}told_late": [one.told_late for one in ours],
            f"{mark}refused_by_reason": [one.judged.refused_by_reason for one in ours],
            f"{mark}sim_difference": [rounded(one.sim_difference) for one in ours],
            f"{mark}seconds_by_kind": [_rounded(one.seconds) for one in ours],
            f"{mark}loads": [one.loads for one in ours],
            f"{mark}loading_s": [round(one.loading_s, 1) for one in ours],
            f"{mark}load_estimate_error": _mean_error(ours),
            f"{mark}client_lag_s_p99": [rounded(one.judged.lag_s_p99) for one in ours],
        }
        name = each.scene.peer
        ratio = each.scene.gain or f"{name}_ratio"
        found |= {
            f"{name}_met_share": [rounded(one.met_share) for one in peer],
            ratio: [_ratio(a, b) for a, b in zip(ours, peer, strict=False)],
            f"{name}_ttft_s_p95": [rounded(one.ttft_s(95)) for one in peer],
            f"{name}_seconds_by_kind": [_rounded(one.seconds) for one in peer],
            f"{name}_loads": [one.loads for one in peer],
            f"{name}_loading_s": [round(one.loading_s, 1) for one in peer],
        }
    return found


def _mean_error(ours: Sequence[Measured]) -> float | None:
    """Over the loads at all rates."""
    errors = [error for one in ours for error in one.load_errors]
    return round(fmean(errors), 3) if errors else None


def _ratio(ours: Measured, peer: Measured) -> float | None:
    """Calls met over the peer's; None where it met none."""
    return round(ours.met / peer.met, 2) if peer.met else None


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {kind: round(value, 1) for kind, value in seconds.items()}
