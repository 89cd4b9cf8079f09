"""`mesh bench fidelity`: how true the simulator is, measured against a live cell of this machine.

It starts a controller and a node with the real engine, offers them bursts through the public API,
and lets the simulator run the same arrivals on a virtual node that the node's profile and the first
part of the run have calibrated.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.cell import LocalCell, running_cell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.options import format_option, home_option
from mesh.cli.output import Format, text_columns
from mesh.cli.progress import progress
from mesh.cli.stopping import Stopping
from mesh.cli.verbs.demo import SOURCE
from mesh.domain.units import format_bytes, parse_bytes
from mesh.evaluation.fidelity.comparing import (
    E2E_ERROR_MAX,
    REFUSED_ERROR_MAX,
    TPOT_ERROR_MAX,
    TTFT_P95_ERROR_MAX,
    Comparison,
    Pair,
)
from mesh.evaluation.fidelity.live import LiveSide, Wanted
from mesh.evaluation.fidelity.report import SIMULATIONS, FidelityReport, report_on

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


POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--seconds", type=POSITIVE, default=300.0, show_default=True, help="Compared.")
@click.option(
    "--calibrate",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds before them that calibrate the simulator.",
)
@click.option(
    "--load",
    type=POSITIVE,
    default=1.5,
    show_default=True,
    help="Offered, over what the node could compute.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option(
    "--simulations",
    type=click.IntRange(min=1, max=100),
    default=SIMULATIONS,
    show_default=True,
    help="Of each kind, with other draws of how long single iterations take.",
)
@click.option("--source", default=SOURCE, help="Another model than the demo's.")
@click.option("--remeasure", is_flag=True, help="Measure the profile even if a fresh one is there.")
@click.option("--memory", metavar="SIZE", help="Limit of the node's process, such as 1GiB.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads that the node computes with.")
@format_option
@home_option
def fidelity(
    seconds: float,
    calibrate: float,
    load: float,
    seed: int,
    simulations: int,
    source: str,
    remeasure: bool,
    memory: str | None,
    threads: int | None,
    form: Format,
    home: Path,
) -> None:
    """Compare a live cell of this machine with a simulation of it."""
    wanted = Wanted(
        source=source,
        calibrate_s=calibrate,
        compare_s=seconds,
        load=load,
        seed=seed,
        remeasure=remeasure,
    )
    memory_bytes = None if memory is None else parse_bytes(memory)
    with Stopping() as stopping, progress("fidelity") as report:

        def start(home: Path, journals: Path) -> AbstractContextManager[LocalCell]:
            plan = CellPlan(
                listen="127.0.0.1:0",
                home=home,
                nodes=plan_nodes(["cpu"]),
                threads=threads,
                memory_bytes=memory_bytes,
                node_journals=journals,
            )
            return running_cell(plan, stopping)

        def told(phase: str, share: float) -> None:
            if stopping.asked():
                raise KeyboardInterrupt
            report(phase, share)

        live = LiveSide(wanted, home, start, told).run()
        report("simulate", 1.0)
        found = report_on(live, simulations=simulations)
    if form is not Format.TABLE:
        output.structured(summary(found), form)
        return
    output.table(COLUMNS, rows(found))
    output.text("")
    output.fields(fields(found))
