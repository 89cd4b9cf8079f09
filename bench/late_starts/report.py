"""What came of calls from zero: who was told to be late, by how much they were, and the targets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from bench.printing import last_line, rounded, show_table
from mesh.cli import output
from mesh.domain.outcome import Outcome
from mesh.domain.views import InstanceSnapshot
from mesh.evaluation.judging import Judgement

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


def report(scenes: Sequence[Scene]) -> None:
    output.text(LEGEND)
    show_table(HEADINGS, [row(scene) for scene in scenes])
    last_line(figures(scenes))


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
