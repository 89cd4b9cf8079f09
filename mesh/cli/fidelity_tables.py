"""What `mesh bench fidelity` shows: live and simulated figures, and what was calibrated."""

from mesh.cli.output import Column
from mesh.cli.plain import Plain, plain
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

COLUMNS = (
    Column("FIGURE"),
    Column("LIVE", right=True),
    Column("SIMULATED", right=True),
    Column("ERROR %", right=True),
    Column("AT LIVE PACE", right=True),
    Column("ERROR %", right=True),
    Column("TARGET %", right=True),
)


def rows(report: FidelityReport) -> list[tuple[str, ...]]:
    first, second = report.by_calibration, report.by_pace
    return [
        _row("TPOT mean, ms", first.tpot_s, second.tpot_s, 1000, TPOT_ERROR_MAX),
        _row("end to end mean, s", first.e2e_s, second.e2e_s, 1, E2E_ERROR_MAX),
        _row("TTFT p95, s", first.ttft_s_p95, second.ttft_s_p95, 1, TTFT_P95_ERROR_MAX),
        _row("refused", first.refused, second.refused, 1, REFUSED_ERROR_MAX),
        _row("SLO met", first.met, second.met, 1, None),
    ]


def _row(
    name: str, first: Pair, second: Pair, scale: float, target: float | None
) -> tuple[str, ...]:
    def number(value: float) -> str:
        return f"{value * scale:.0f}" if name in ("refused", "SLO met") else f"{value * scale:.4g}"

    return (
        name,
        number(first.live),
        number(first.simulated),
        f"{100 * first.error:.1f}",
        number(second.simulated),
        f"{100 * second.error:.1f}",
        "" if target is None else f"{100 * target:.0f}",
    )


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


def summary(report: FidelityReport) -> Plain:
    """For programs: the errors of the simulation that knows the calibration alone come first."""
    return {
        **_errors(report.by_calibration),
        "within_targets": report.by_calibration.within_targets,
        "at_live_pace": {
            **_errors(report.by_pace),
            "within_targets": report.by_pace.within_targets,
            "figures": plain(report.by_pace),
        },
        "figures": plain(report.by_calibration),
        "calibrated_s": report.calibrated_s,
        "calibrated_steps": report.calibrated_steps,
        "pace_calibrated": report.pace_calibrated,
        "pace_compared": report.pace_compared,
        "loads": report.loads,
        "resizes": report.resizes,
        "unloads": report.unloads,
        "delay_s": report.delay_s,
        "rss_bytes_max": report.rss_bytes_max,
        "booked_bytes_max": report.booked_bytes_max,
        "costs": plain(report.costs),
    }


def _errors(made: Comparison) -> dict[str, Plain]:
    return {
        "tpot_error": plain(made.tpot_s.error),
        "e2e_error": plain(made.e2e_s.error),
        "ttft_p95_error": plain(made.ttft_s_p95.error),
        "refused_error": plain(made.refused.error),
        "refused_share_error": made.refused_share_error,
        "requests": made.requests,
        "finished_in_both": made.finished_in_both,
        "refused": plain(made.refused),
        "met": plain(made.met),
    }
