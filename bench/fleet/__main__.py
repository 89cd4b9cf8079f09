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

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.fleet.cell import (
    PROFILED,
    deployed_home,
    measured,
    memory_bytes,
    profiled_home,
    simulated_met_shares,
)
from bench.fleet.peer import swapped
from bench.fleet.report import Measured, Played, report
from bench.fleet.seconds import Kind, Span, seconds_by_kind, spans_of
from bench.fleet.workload import SCENES, Scene, calls
from bench.own_models import plant_models
from bench.printing import errors_told, show_status
from mesh.cli.output import message
from mesh.domain.errors import InvalidInput
from mesh.domain.model import WeightPrecision
from mesh.evaluation.fidelity.report import LiveRun
from mesh.evaluation.judging import judge
from mesh.evaluation.load_client import Answer, Call

PATIENCE_S = 300.0
"""Callers wait for so long after the last call was sent."""


class Bench:
    """`folder` keeps the state of cells from one run to the next."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._store = folder / "store"
        self._options = options

    def play(self, scene: Scene) -> Played:
        show_status(f"{scene.name}: models for {scene.deployments} deployments")
        names = scene.names() if self._store.exists() else [PROFILED, *scene.names()]
        plant_models(self._store, names, scene.weights)
        without = scene.without
        deployed = plain = self._deployed(without)
        if scene != without:
            deployed = self._deployed(scene)
        node_bytes = memory_bytes(scene, plain)
        rates = self._options.rates or scene.rates
        seconds = self._options.seconds or scene.seconds
        ours, peer, runs = [], [], []
        for rate in rates:
            sent = calls(scene, rate=rate, seconds=seconds, seed=self._options.seed)
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
            elif self._options.peer:
                peer.append(self._peer(scene, rate, seconds, sent))
        if self._options.sim and not scene.conversations:
            ours = self._simulated(scene, ours, runs)
        return Played(scene=scene, ours=tuple(ours), peer=tuple(peer))

    def _deployed(self, scene: Scene) -> Path:
        """The state of a cell with the scene's deployments, and their profile with `--survey`."""
        weights = scene.weights or "default"
        name = scene.name if scene.prefix_cache else f"{scene.name}-without"
        profiled, deployed = (self._folder / f"{n}-{weights}" for n in ("profiled", name))
        if self._options.survey and not profiled.exists():
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


def main() -> None:
    names = [scene.name for scene in SCENES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", choices=names, help="only this one")
    parser.add_argument(
        "--weights", type=WeightPrecision, metavar="WEIGHTS", help="the first scene with these"
    )
    parser.add_argument("--rates", type=_rate, nargs="+", metavar="RATE", help="calls a second")
    parser.add_argument("--seconds", type=_rate, help="that calls are sent for, at each rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="mesh alone")
    parser.add_argument("--no-sim", dest="sim", action="store_false", help="nothing simulated")
    parser.add_argument("--survey", action="store_true", help="survey the model first")
    options = parser.parse_args()
    wanted = [scene for scene in SCENES if options.scene in (None, scene.name)]
    if options.weights is not None:
        wanted = [SCENES[0].with_weights(options.weights)]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        with errors_told():
            played = [bench.play(scene) for scene in wanted]
    report(played, surveyed=options.survey)


def _rate(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


if __name__ == "__main__":
    main()
