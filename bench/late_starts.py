"""Calls each of 20 deployments once from zero, and compares what callers are told with what comes.

Each has a model of its own, of the demo model's shape. In two scenes, each on a fresh cell that
knows no profile and no load time: one call after the other, and all at once. There is memory for
all. A caller is told when it is admitted by how much its first token will be late for the sake of a
load, if at all. How long loads were expected to take is compared with what they took. The last line
is one JSON object, with lists by scene: `late_over_told` is by how much first tokens were late over
what was told. Exit code 1 when a target was missed.
"""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated

from bench.cells import local_cell
from bench.harness import Report, Table, rounded, show_status
from bench.own_models import own_source, plant_models
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.ids import DeploymentName
from mesh.domain.outcome import Outcome
from mesh.domain.slo import Slo
from mesh.domain.views import InstanceSnapshot
from mesh.evaluation.judging import Judgement, judge
from mesh.evaluation.load_client import Answer, Call, offer
from mesh.wire.client import MeshClient

LATE_OVER_TOLD = (0.7, 1.3)
"""The least and the most that is as told."""
HEADINGS = (
    *("scene", "calls", "served", "told in time", "met", "told late", "told s", "late s"),
    *("late/told", "least", "most", "load error"),
)
LEGEND = (
    "met: those told in time, with TTFT, mean TPOT and every token in time. told s, late s: of "
    "those told late, medians; late/told: by how much the first token was late over what was told; "
    "load error: by what share of what a load took it was expected otherwise, in the mean"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    name: str
    judged: Judgement
    loads: tuple[InstanceSnapshot, ...] = ()
    """Instances as they were at the end, all loaded in the scene."""

    @property
    def served(self) -> int:
        return self.judged.finished

    @property
    def told_in_time(self) -> tuple[Outcome, ...]:
        return self.judged.promised

    @property
    def met_of_told_in_time(self) -> float | None:
        """The share that met both measures; None where nobody was told so."""
        told = self.told_in_time
        met = sum(o.met_without_grace and o.met_in_the_mean_without_grace for o in told)
        return met / len(told) if told else None

    @property
    def told_late(self) -> tuple[Outcome, ...]:
        return tuple(each.outcome for each in self.judged.all if each.outcome.grace_s > 0.0)

    @property
    def load_estimate_error(self) -> float | None:
        """By what share of what a load took it was expected otherwise, in the mean."""
        errors = [abs(load.load_s - load.load_expected_s) / load.load_s for load in self.loads]
        return mean(errors) if errors else None

    @property
    def as_told(self) -> bool:
        """Whoever was told to be late has a first token, and that is late by what was told."""
        least, most = LATE_OVER_TOLD
        late = self.judged.late_over_told
        came = len(late) == len(self.told_late)
        return came and all(least <= share <= most for share in late)


def row(scene: Scene) -> tuple[str, ...]:
    late, judged = scene.told_late, scene.judged
    late_s = [o.tokens_s[0] - o.due_s(0) for o in late if o.tokens_s]
    shares = judged.late_over_told
    met = scene.met_of_told_in_time
    error = scene.load_estimate_error
    return (
        scene.name,
        str(judged.requests),
        str(scene.served),
        str(len(scene.told_in_time)),
        "" if met is None else f"{met:.0%}",
        str(len(late)),
        *(f"{median(s):.2f}" if s else "" for s in ([o.grace_s for o in late], late_s)),
        *(f"{pick(shares):.2f}" if shares else "" for pick in (median, min, max)),
        "" if error is None else f"{error:.0%}",
    )


def figures(scenes: Sequence[Scene]) -> dict[str, object]:
    """Lists are by scene."""
    shares = [scene.judged.late_over_told for scene in scenes]
    return {
        "scenes": [scene.name for scene in scenes],
        "calls": [scene.judged.requests for scene in scenes],
        "served": [scene.served for scene in scenes],
        "told_in_time": [len(scene.told_in_time) for scene in scenes],
        "met_of_told_in_time": [rounded(scene.met_of_told_in_time) for scene in scenes],
        "told_late": [len(scene.told_late) for scene in scenes],
        "late_over_told_p50": [rounded(median(each)) if each else None for each in shares],
        "late_over_told_min": [rounded(min(each, default=None)) for each in shares],
        "late_over_told_max": [rounded(max(each, default=None)) for each in shares],
        "late_ratio": [rounded(mean(each)) if each else None for each in shares],
        "load_estimate_error": [rounded(scene.load_estimate_error) for scene in scenes],
        "load_tiers": [Counter(load.tier or "" for load in scene.loads) for scene in scenes],
        "refused_by_reason": [scene.judged.refused_by_reason for scene in scenes],
    }


def targets(scenes: Sequence[Scene]) -> dict[str, bool]:
    """Whether each is reached."""
    return {
        "served": all(scene.served == scene.judged.requests for scene in scenes),
        "met_of_told_in_time": all(scene.met_of_told_in_time in (None, 1.0) for scene in scenes),
        "late_over_told": all(scene.as_told for scene in scenes),
    }


DEPLOYMENTS = 20
SLO = Slo(ttft_s=2.0, tpot_s=0.25)
CONTEXT_TOKENS = 1024
PROMPT_TOKENS, OUTPUT_TOKENS = 27, 32
TOKEN_IDS = range(100, 2000)
CALL_S_MAX = 180.0

Offer = Callable[[str, Sequence[Call]], list[Answer]]


def one_by_one(address: str, calls: Sequence[Call]) -> list[Answer]:
    """Each when the one before it has ended."""
    return [answer for call in calls for answer in offer(address, [call], call_s_max=CALL_S_MAX)]


def all_at_once(address: str, calls: Sequence[Call]) -> list[Answer]:
    return offer(address, calls, call_s_max=CALL_S_MAX)


SCENES: dict[str, Offer] = {"one by one": one_by_one, "all at once": all_at_once}


def drawn_calls(deployments: int, seed: int) -> list[Call]:
    draw = random.Random(seed)
    return [
        Call(
            at_s=0.0,
            deployment=DeploymentName(f"late-{number:02}"),
            slo=SLO,
            prompt_tokens=tuple(draw.choices(TOKEN_IDS, k=PROMPT_TOKENS)),
            output_tokens=OUTPUT_TOKENS,
        )
        for number in range(1, deployments + 1)
    ]


def play(name: str, offered: Offer, calls: Sequence[Call], store: Path) -> Scene:
    """Raises MeshError when a part of the cell ends."""
    with local_cell(store=store) as cell:
        with MeshClient(cell.address) as client:
            for call in calls:
                show_status(f"{name}: deploy {call.deployment}")
                client.deploy(
                    DeploymentSpec(
                        name=call.deployment,
                        source=own_source(call.deployment),
                        context_tokens_max=CONTEXT_TOKENS,
                        slo=call.slo,
                    )
                )
        show_status(f"{name}: {len(calls)} calls")
        answers = offered(cell.address, calls)
        cell.check_alive()
        with MeshClient(cell.address) as client:
            instances = [i for deployment in client.list() for i in deployment.instances]
    loads = tuple(i for i in instances if i.tier is not None)
    return Scene(name=name, judged=judge(calls, answers), loads=loads)


def report(scenes: Sequence[Scene]) -> Report:
    table = Table(headings=HEADINGS, rows=[row(scene) for scene in scenes])
    return Report(figures=figures(scenes), shown=(LEGEND, table), targets=targets(scenes))


def run(
    *,
    deployments: int = DEPLOYMENTS,
    seed: int = 1,
    uncompiled: Annotated[bool, "the shape has no blob when a scene begins"] = False,
) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        calls = drawn_calls(deployments, seed)
        plant_models(store, [call.deployment for call in calls])
        scenes = []
        for name, offered in SCENES.items():
            if uncompiled:
                shutil.rmtree(store / "compiled", ignore_errors=True)
            scenes.append(play(name, offered, calls, store))
    return report(scenes)
