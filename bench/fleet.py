"""Many deployments on one CPU node, in four scenes, beside llama.cpp as a person would set it up.

`fleet`: 40 deployments, memory for 11, called rarely; the peer is a swapper, first come, first
served, least recently used out. `resident`: 8 deployments that are all loaded; the peer is eight
servers side by side. `locality`: 40 deployments, memory for 10, first tokens due before a load is
over; the peer is mesh with nothing loaded ahead, and `locality_gain` is what is met with over
without. `--weights i4` plays `fleet` alone, beside mesh with weights as by default in the same
memory: `i4_gain`. At each rate mesh and its peer get the same calls, one after the other, each call
at its time whatever became of those before. What is met is counted by the client's clock;
`sim_difference` is what share mesh met, less what simulations of the same runs say (none of
`conversations`, whose prompts the simulated calls do not know). The last line is one JSON object,
with lists by rate.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from bench.fleet_cell import (
    PROFILED,
    deployed_home,
    measured,
    memory_bytes,
    profiled_home,
    simulated_met_shares,
    spans_of,
)
from bench.fleet_peer import swapped
from bench.fleet_workload import SCENES, Kind, Scene, Span, calls, seconds_by_kind
from bench.harness import Report, Table, rounded, show_status
from bench.own_models import plant_models
from mesh.cli.output import message
from mesh.domain.errors import InvalidInput
from mesh.domain.model import WeightPrecision
from mesh.evaluation.distribution import Distribution
from mesh.evaluation.fidelity.report import LiveRun
from mesh.evaluation.judging import Judgement, judge
from mesh.evaluation.load_client import Answer, Call

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


PATIENCE_S = 300.0
"""Callers wait for so long after the last call was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options."""

    rates: tuple[float, ...]
    seconds: float | None
    seed: int
    peer: bool
    sim: bool
    survey: bool


class Bench:
    """`folder` keeps the state of cells from one run to the next."""

    def __init__(self, folder: Path, asked: Asked) -> None:
        self._folder = folder
        self._store = folder / "store"
        self._asked = asked

    def play(self, scene: Scene) -> Played:
        show_status(f"{scene.name}: models for {scene.deployments} deployments")
        names = scene.names() if self._store.exists() else [PROFILED, *scene.names()]
        plant_models(self._store, names, scene.weights)
        without = scene.without
        deployed = plain = self._deployed(without)
        if scene != without:
            deployed = self._deployed(scene)
        node_bytes = memory_bytes(scene, plain)
        rates = self._asked.rates or scene.rates
        seconds = self._asked.seconds or scene.seconds
        ours, peer, runs = [], [], []
        for rate in rates:
            sent = calls(scene, rate=rate, seconds=seconds, seed=self._asked.seed)
            show_status(f"{scene.name}, {rate:g} calls/s: {len(sent)} calls to mesh")
            until_s = seconds + PATIENCE_S
            answers, run, errors = measured(
                scene, deployed, self._store, sent, until_s, memory_bytes=node_bytes
            )
            one = _measured(rate, seconds, sent, answers, spans_of(run.observed))
            ours.append(replace(one, load_errors=errors))
            runs.append(run)
            if scene.gain:
                show_status(f"{scene.name}, {rate:g} calls/s: {len(sent)} calls without")
                answers, run, _ = measured(
                    *(scene, plain, self._store, sent, until_s),
                    memory_bytes=node_bytes,
                    ahead=scene != without,
                )
                peer.append(_measured(rate, seconds, sent, answers, spans_of(run.observed)))
            elif self._asked.peer:
                peer.append(self._peer(scene, rate, seconds, sent))
        if self._asked.sim and not scene.conversations:
            ours = self._simulated(scene, ours, runs)
        return Played(scene=scene, ours=tuple(ours), peer=tuple(peer))

    def _deployed(self, scene: Scene) -> Path:
        """The state of a cell with the scene's deployments, and their profile with `--survey`."""
        weights = scene.weights or "default"
        name = scene.name if scene.prefix_cache else f"{scene.name}-without"
        profiled, deployed = (self._folder / f"{n}-{weights}" for n in ("profiled", name))
        if self._asked.survey and not profiled.exists():
            profiled.mkdir()
            profiled_home(profiled, self._store, scene.weights, show_status)
        deployed_home(profiled, deployed, self._store, scene, show_status)
        return deployed

    def _simulated(
        self, scene: Scene, ours: list[Measured], runs: Sequence[LiveRun]
    ) -> list[Measured]:
        show_status(f"{scene.name}: simulated")
        try:
            shares = simulated_met_shares(runs)
        except InvalidInput as error:
            message(f"{scene.name}, not simulated: {error}")
            return ours
        return [
            replace(one, simulated_met_share=share) for one, share in zip(ours, shares, strict=True)
        ]

    def _peer(self, scene: Scene, rate: float, seconds: float, sent: Sequence[Call]) -> Measured:
        show_status(f"{scene.name}, {rate:g} calls/s: {len(sent)} calls to its peer")
        with tempfile.TemporaryDirectory() as folder:
            answers, spans = swapped(scene, sent, Path(folder), seconds + PATIENCE_S)
        return _measured(rate, seconds, sent, answers, spans)


def _measured(
    rate: float,
    seconds: float,
    sent: Sequence[Call],
    answers: Sequence[Answer],
    spans: Sequence[Span],
) -> Measured:
    start_s = answers[0].sent_s - answers[0].lag_s - sent[0].at_s
    until_s = start_s + seconds
    loads = [span for span in spans if span.kind is Kind.LOAD]
    return Measured(
        rate=rate,
        judged=judge(sent, answers),
        seconds=seconds_by_kind(spans, start_s, until_s),
        loads=sum(start_s <= load.began_s < until_s for load in loads),
        loading_s=seconds_by_kind(loads, start_s, until_s)[Kind.LOAD],
    )


def report(played: Sequence[Played], *, surveyed: bool) -> Report:
    shown: list[Table | str] = [LEGEND]
    for each in played:
        scene, slo = each.scene, each.scene.slo
        named = [("mesh", one) for one in each.ours] + [("peer", one) for one in each.peer]
        by_rate = sorted(named, key=lambda pair: pair[1].rate)
        shown += [
            (
                f"{scene.name}: {scene.deployments} deployments, memory for {scene.resident_max}; "
                f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s, by the clock"
            ),
            Table(headings=HEADINGS, rows=[_row(name, one) for name, one in by_rate]),
        ]
        for one in each.ours:
            if reasons := one.judged.refused_by_reason:
                words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                shown.append(f"refused at {one.rate:g} calls/s: {words}")
    shown.append(f"The cells are {'surveyed' if surveyed else 'as `mesh up` starts them'}.")
    return Report(figures=figures(played), shown=shown, surveyed=surveyed)


def run(
    *,
    scene: Annotated[
        Literal["fleet", "resident", "locality", "conversations"] | None, "only this scene"
    ] = None,
    weights: Annotated[WeightPrecision | None, "the first scene with these weights"] = None,
    rates: Annotated[tuple[float, ...], "calls a second"] = (),
    seconds: float | None = None,
    seed: int = 1,
    peer: Annotated[bool, "measure mesh alone"] = True,
    sim: Annotated[bool, "simulate nothing"] = True,
    survey: bool = False,
) -> Report:
    wanted = [each for each in SCENES if scene in (None, each.name)]
    if weights is not None:
        wanted = [SCENES[0].with_weights(weights)]
    asked = Asked(rates=tuple(rates), seconds=seconds, seed=seed, peer=peer, sim=sim, survey=survey)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), asked)
        return report([bench.play(each) for each in wanted], surveyed=survey)
