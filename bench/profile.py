"""Predicts iterations of the demo model by a profile of it, and measures them.

The engine runs in this process, driven as a node drives it, so that the figures are the profile's
alone. First a minute of load, of which nothing counts; then prompts and batches on a quiet machine
(`bench.profile.quiet`), then batches beside processes that take every core. The last line is one
JSON object: mean deviations |predicted / measured - 1| (`prefill_error`, `decode_error`: by the
profile as iterations refine it; `_corrected`: with the factor for neighbours besides;
`_as_it_comes`: quiet or not), and how soon that factor notices a neighbour. `--neighbours`: others
compute in turns during the survey.
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import mean
from typing import Annotated

from bench.harness import Report, Table, show_status
from bench.profile_measuring import (
    REFERENCE,
    TOLERANCE,
    Iteration,
    Measuring,
    Noisy,
    Predictions,
    PrimedModel,
    Quiet,
    Surveyed,
    Workloads,
    neighbours_in_turns,
    prompts,
    sweeps,
)
from mesh.compute.times import Times
from mesh.report.distribution import Distribution

WORKLOADS = 100
"""Prompts, and as many batches."""
SWEEPS = 6
LOAD_S = 60.0
"""Before anything counts: a profile is refined by what is computed."""
NOISY_WORKLOADS = 20
NOISY_WORKLOAD_S = 2.0
QUICK = 10
"""So many times fewer workloads in a functional trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    surveyed: Surveyed
    prefills: Workloads
    decodes: Workloads
    noisy: Noisy
    quiet: Quiet


def measure(seed: int, quick: bool, neighbours: bool) -> Measured:
    fewer = QUICK if quick else 1
    draw = random.Random(seed)
    model = PrimedModel(seed)
    try:
        measuring = Measuring(model, draw, show_status)
        with neighbours_in_turns() if neighbours else nullcontext():
            surveyed = measuring.survey()
        predictions = Predictions(surveyed.profile)
        measuring.load(predictions, LOAD_S / fewer)
        quiet = Quiet(model.measure, Times(surveyed.profile).iteration_s(REFERENCE))
        return Measured(
            surveyed=surveyed,
            quiet=quiet,
            prefills=measuring.prefills(predictions, prompts(draw, WORKLOADS // fewer), quiet),
            decodes=measuring.decodes(
                predictions, sweeps(draw, WORKLOADS // fewer, max(SWEEPS // fewer, 1)), quiet
            ),
            noisy=measuring.noisy(predictions, NOISY_WORKLOADS // fewer, NOISY_WORKLOAD_S),
        )
    finally:
        model.close()


def figures(measured: Measured) -> dict[str, float | None]:
    prefills, decodes, noisy = measured.prefills, measured.decodes, measured.noisy
    return {
        "prefill_error": _mean(prefills.quiet, "deviation_refined"),
        "decode_error": _mean(decodes.quiet, "deviation_refined"),
        "prefill_deviation": _mean(prefills.quiet),
        "decode_deviation": _mean(decodes.quiet),
        "prefill_deviation_corrected": _mean(prefills.quiet, "deviation_corrected"),
        "decode_deviation_corrected": _mean(decodes.quiet, "deviation_corrected"),
        "prefill_deviation_as_it_comes": _mean(prefills.first),
        "decode_deviation_as_it_comes": _mean(decodes.first),
        "disturbed_share": round(measured.quiet.disturbed_first / measured.quiet.first_tries, 3),
        "disturbed": measured.quiet.disturbed,
        "noisy_deviation_uncorrected": _mean(noisy.workloads),
        "noisy_deviation_corrected": _mean(noisy.workloads, "deviation_corrected"),
        "noticed_s": noisy.noticed_s and round(noisy.noticed_s, 2),
        "recovered_s": noisy.recovered_s and round(noisy.recovered_s, 2),
        "survey_s": round(measured.surveyed.took_s, 1),
        "shapes": measured.surveyed.shapes,
    }


KINDS = ("deviation", "deviation_refined", "deviation_corrected")


def _mean(workloads: Sequence[Iteration], kind: str = "deviation") -> float:
    return float(round(mean(getattr(each, kind) for each in workloads), 4))


def _cells(deviations: Sequence[float]) -> tuple[str, str]:
    p90 = Distribution.of(deviations).at(90) or 0.0
    return f"{100 * mean(deviations):.1f}", f"{100 * p90:.1f}"


def _seconds(seconds: float | None) -> str:
    return "(never)" if seconds is None else f"{seconds:.1f} s"


def report(measured: Measured) -> Report:
    rows = [
        (
            name,
            str(len(workloads)),
            *(cell for kind in KINDS for cell in _cells([getattr(i, kind) for i in workloads])),
        )
        for name, workloads in (
            ("prefill, quiet", measured.prefills.quiet),
            ("prefill, as it comes", measured.prefills.first),
            ("decode, quiet", measured.decodes.quiet),
            ("decode, as it comes", measured.decodes.first),
            ("decode, noisy neighbour", measured.noisy.workloads),
        )
    ]
    kinds = ("profile alone: mean", "p90", "refined: mean", "p90", "corrected: mean", "p90")
    table = Table(
        headings=("", "workloads", *kinds),
        rows=rows,
        title="|predicted / measured - 1|, per cent",
    )
    surveyed, noisy, quiet = measured.surveyed, measured.noisy, measured.quiet
    disturbed = (
        f"{quiet.disturbed_first} of {quiet.first_tries} workloads met a machine that was not "
        f"quiet, of which all but {quiet.disturbed} were measured again"
    )
    survey = (
        f"survey: {surveyed.shapes} shapes in {surveyed.took_s:.0f} s; corrected predictions are "
        f"within {100 * TOLERANCE:.0f} % {_seconds(noisy.noticed_s)} after the neighbour came "
        f"and {_seconds(noisy.recovered_s)} after it went"
    )
    return Report(figures=figures(measured), shown=(table, disturbed, survey), surveyed=True)


def run(
    *,
    seed: int = 1,
    quick: Annotated[bool, "a tenth of it, to see that it works"] = False,
    neighbours: Annotated[bool, "the survey has neighbours"] = False,
) -> Report:
    return report(measure(seed, quick, neighbours))
