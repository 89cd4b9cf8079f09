"""What `mesh bench fidelity` shows: live and simulated figures, and what was calibrated."""

import dataclasses
from collections.abc import Callable

from mesh.cli.output import text_columns
from mesh.domain.units import format_bytes
from mesh.evaluation.fidelity.comparing import (
    E2E_ERROR_MAX,
    REFUSED_ERROR_MAX,
    TPOT_ERROR_MAX,
    TTFT_P95_ERROR_MAX,
    Comparison,
    Pair,
)
from mesh.evaluation.fidelity.report import FidelityReport

COLUMNS = text_columns(
    ("FIGURE", "LIVE", "SIMULATED", "ERROR %", "AT LIVE PACE", "ERROR %", "TARGET %")
)
_FIGURES: tuple[tuple[str, Callable[[Comparison], Pair], str, float, float | None], ...] = (
    ("TPOT mean, ms", lambda c: c.tpot_s, ".4g", 1000, TPOT_ERROR_MAX),
    ("end to end mean, s", lambda c: c.e2e_s, ".4g", 1, E2E_ERROR_MAX),
    ("TTFT p95, s", lambda c: c.ttft_s_p95, ".4g", 1, TTFT_P95_ERROR_MAX),
    ("refused", lambda c: c.refused, ".0f", 1, REFUSED_ERROR_MAX),
    ("SLO met", lambda c: c.met, ".0f", 1, None),
)
"""How each is written, what it is multiplied with before, and how large its error may be."""


def rows(report: FidelityReport) -> list[tuple[str, ...]]:
    found = []
    for name, figure, form, scale, target in _FIGURES:
        calibrated, paced = figure(report.by_calibration), figure(report.by_pace)
        row = [name, format(calibrated.live * scale, form)]
        for pair in (calibrated, paced):
            row += [format(pair.simulated * scale, form), f"{100 * pair.error:.1f}"]
        found.append((*row, "" if target is None else f"{100 * target:.0f}"))
    return found


def fields(report: FidelityReport) -> list[tuple[str, str]]:
    made, paced, costs = report.by_calibration, report.by_pace, report.costs
    return [
        ("simulations", f"{made.simulations} of each kind; figures are of all of them"),
        ("requests compared", str(made.requests)),
        ("finished on both sides", _both(made.finished_in_both, paced.finished_in_both)),
        ("finished on both or neither", _both(made.same_end, paced.same_end)),
        ("calibrated by the first", f"{report.calibrated_s:g} s, which are not compared"),
        ("iterations of them", str(report.calibrated_steps)),
        ("iterations over profile", f"{costs.factor:.3f}"),
        ("those with prompts, further", f"{costs.prefill_factor:.3f}"),
        ("node's own part", f"{1000 * costs.overhead_s:.2f} ms an iteration"),
        ("client to node and back", f"{1000 * report.delay_s:.2f} ms"),
        ("loads", _each(report.loads, costs.load_s)),
        ("a load beside requests", f"{costs.load_stretch:.2f} times as long"),
        ("resizes", _each(report.resizes, costs.resize_s)),
        ("unloads", _each(report.unloads, costs.unload_s)),
        ("iteration beside a load", f"{costs.load_slowdown:.2f} times as long"),
        ("priming of a size", f"{1000 * costs.priming_s:.1f} ms more than the iteration"),
        ("node's RSS, at most", format_bytes(report.rss_bytes_max)),
        ("by its books, at most", format_bytes(report.booked_bytes_max)),
        ("pace of the rest", f"{_slower(report):.3f} times as long an iteration"),
    ]


def _both(calibrated: float, paced: float) -> str:
    return f"{calibrated:.0f}, {paced:.0f} at the live pace"


def _slower(report: FidelityReport) -> float:
    return report.pace_compared / report.pace_calibrated


def _each(count: int, seconds: float) -> str:
    taken = f"{1000 * seconds:.1f} ms each"
    return f"{count}, {taken}" if count else f"none seen, assumed {taken}"


def summary(report: FidelityReport) -> dict[str, object]:
    """For programs: the errors of the simulation that knows the calibration alone come first."""
    sides = ("by_calibration", "by_pace")
    told = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    return {
        **_errors(report.by_calibration),
        "at_live_pace": _errors(report.by_pace),
        **{name: value for name, value in told.items() if name not in sides},
    }


def _errors(made: Comparison) -> dict[str, object]:
    return {
        "tpot_error": made.tpot_s.error,
        "e2e_error": made.e2e_s.error,
        "ttft_p95_error": made.ttft_s_p95.error,
        "refused_error": made.refused.error,
        "refused_share_error": made.refused_share_error,
        "requests": made.requests,
        "finished_in_both": made.finished_in_both,
        "refused": made.refused,
        "met": made.met,
        "within_targets": made.within_targets,
        "figures": made,
    }
