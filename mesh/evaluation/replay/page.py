"""A replay as one HTML page: tables, and calls over time. Before: `report`. After: a file."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mesh.domain.errors import StorageError, system_errors
from mesh.evaluation.replay.report import ReplayReport, remarks
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.tables import tables
from mesh.report.calls import CallEnd
from mesh.report.cell_page import sections
from mesh.report.cell_report import CellReport, cell_report
from mesh.report.charts.chart import Chart, Line, LineChart, Points
from mesh.report.charts.page import Section, drawn, of_table, render

BINS = 120
"""Points of a line over time."""


def write_page(report: ReplayReport, path: Path) -> None:
    """Raises StorageError."""
    write_text(page(report), path)


def write_text(text: str, path: Path) -> None:
    """Something of the report. Raises StorageError."""
    hint = "choose a file in a folder that is there"
    with system_errors(StorageError, f"the report {path} cannot be written", hint):
        path.write_text(text, encoding="utf-8")


def page(report: ReplayReport) -> str:
    """The whole text of the page."""
    plan = report.plan
    about = [
        f"{len(plan.calls)} calls of {plan.functions} functions to {len(plan.deployments)} "
        f"deployments within {plan.duration_s:.0f} s; answers "
        + ("of the trace's lengths." if plan.forced else "as long as the model makes them."),
        *remarks(report),
    ]
    return render(f"Replay of {plan.name}", about, list(_sections(report)))


def _sections(report: ReplayReport) -> Iterator[Section]:
    live = side("live", report.results, report)
    beside = report.simulated_results
    yield from sections(live, side("simulated", beside, report) if beside else None)
    yield Section(title="Over time", charts=drawn(_charts(report)))
    yield from map(of_table, tables(report))


def side(name: str, results: Sequence[CallResult], report: ReplayReport) -> CellReport:
    """The calls of one side as the report of a cell; those that were not sent are left out."""
    ends = [CallEnd.of(result.outcome) for result in results if result.judged]
    until_s = max([report.plan.duration_s, *(end.at_s for end in ends)])
    return cell_report(name, ends, from_s=0.0, until_s=until_s)


def _charts(report: ReplayReport) -> list[Chart]:
    found: list[Chart] = [
        LineChart(
            name="ends",
            title="Calls by how they ended, by when they were due",
            x_label="minutes",
            y_label="calls/s",
            lines=_ends(report),
        ),
        LineChart(
            name="late",
            title="The sender, after the trace's times: the latest call",
            x_label="minutes",
            y_label="ms",
            lines=(Line(name="late", points=_latest(report)),),
        ),
    ]
    return found


def _ends(report: ReplayReport) -> tuple[Line, ...]:
    kinds: tuple[tuple[str, Callable[[CallResult], bool]], ...] = (
        ("SLO met", lambda r: r.outcome.met),
        ("SLO missed", lambda r: r.finished and not r.outcome.met),
        ("refused", lambda r: bool(r.refused)),
        ("failed", lambda r: r.broke),
    )
    width_s = report.plan.duration_s / BINS
    lines = []
    for name, is_one in kinds:
        counts = [0] * BINS
        for result in report.results:
            if is_one(result):
                counts[_bin(result, width_s)] += 1
        if any(counts):
            points = tuple((n * width_s / 60, c / width_s) for n, c in enumerate(counts))
            lines.append(Line(name=name, points=points))
    return tuple(lines)


def _latest(report: ReplayReport) -> Points:
    width_s = report.plan.duration_s / BINS
    latest_ms = [0.0] * BINS
    for result in report.results:
        if result.sent:
            number = _bin(result, width_s)
            latest_ms[number] = max(latest_ms[number], 1000 * result.late_s)
    return tuple((n * width_s / 60, late_ms) for n, late_ms in enumerate(latest_ms))


def _bin(result: CallResult, width_s: float) -> int:
    return min(int(result.call.at_s / width_s), BINS - 1)
