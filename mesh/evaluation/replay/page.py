"""A replay as one HTML page: tables, and calls over time. Before: `report`. After: a file."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mesh.domain.errors import StorageError
from mesh.evaluation.replay.report import ReplayReport, remarks
from mesh.evaluation.replay.results import CallResult
from mesh.evaluation.replay.tables import tables
from mesh.report.charts.chart import BarChart, Bars, Chart, Line, LineChart, Points
from mesh.report.charts.page import Section, drawn, of_table, render
from mesh.report.distribution import Distribution

BINS = 120
"""Points of a line over time."""
BARS_MAX = 24
"""Deployments in a chart of bars: the first by calls."""


def write_page(report: ReplayReport, path: Path) -> None:
    """Raises StorageError."""
    write_text(page(report), path)


def write_text(text: str, path: Path) -> None:
    """Something of the report. Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the report {path} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="choose a file in a folder that is there",
        ) from error


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
    yield Section(title="Overview", wide=drawn([_attained(report)]), charts=drawn(_charts(report)))
    yield from map(of_table, tables(report))


def _charts(report: ReplayReport) -> list[Chart]:
    found: list[Chart] = [
        LineChart(
            name="ttft",
            title="TTFT, share of all calls",
            x_label="seconds",
            y_label="%",
            lines=_both(report, lambda r: r.outcome.ttft_s),
            log_x=True,
            y_most=100.0,
        ),
        LineChart(
            name="tpot",
            title="Mean TPOT, share of all calls",
            x_label="seconds",
            y_label="%",
            lines=_both(report, lambda r: r.outcome.tpot_s),
            y_most=100.0,
        ),
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


def _attained(report: ReplayReport) -> BarChart:
    shown = sorted(report.numbers[1:], key=lambda n: (-n.calls, n.deployment))[:BARS_MAX]
    shown = [each for each in shown if each.judged]
    none = (None,) * len(shown)
    return BarChart(
        name="slo",
        title="SLO met",
        y_label="% of calls",
        groups=tuple(each.deployment for each in shown),
        bars=(
            Bars(
                name="every token",
                values=tuple(100 * each.attainment for each in shown),
                marks=none,
            ),
            Bars(
                name="TTFT and mean TPOT",
                values=tuple(100 * each.attainment_in_the_mean for each in shown),
                marks=none,
            ),
        ),
        y_most=100.0,
    )


def _both(report: ReplayReport, value: Callable[[CallResult], float | None]) -> tuple[Line, ...]:
    sides = [("live", report.results), ("simulated", report.simulated_results)]
    return tuple(Line(name=name, points=_curve(side, value)) for name, side in sides if side)


def _curve(results: Sequence[CallResult], value: Callable[[CallResult], float | None]) -> Points:
    values = [value(result) for result in results if result.judged]
    spread = Distribution.of(each for each in values if each is not None)
    return tuple((x, 100 * share) for x, share in spread.curve(len(values)))


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
