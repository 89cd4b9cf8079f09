"""A cell's report as sections of one HTML page, two of them beside each other where there are two.

`mesh report`, `mesh sim --html` and `mesh replay --report` draw theirs by it. Pure. Before:
`cell_report`. After: `charts.page`.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from mesh.report.cell_report import CallsReport, CellReport
from mesh.report.charts.chart import BarChart, Bars, Chart, Line, LineChart
from mesh.report.charts.page import Drawn, Section, Table, drawn, figure, of_table, render

BARS_MAX = 24
"""Deployments in a chart of bars: the first by calls."""
DISTRIBUTIONS_MAX = 24
MIB = 2**20
_SERVED = (
    *("CALLS", "FINISHED", "REFUSED", "SLO_MET_%", "MET_IN_THE_MEAN_%"),
    *("TTFT_S_P50", "TTFT_S_P95", "TPOT_MS_P50", "TPOT_MS_P95"),
)
_PARTS = ("base", "weights", "kv_used", "kv_cached", "kv_idle", "in_flight")


def page(report: CellReport, beside: CellReport | None = None) -> str:
    """The whole text of a page of its own."""
    sides = [report, *([beside] if beside else [])]
    return render(report.name, [_about(one) for one in sides], list(sections(report, beside)))


def _about(report: CellReport) -> str:
    since = ""
    if report.began_unix_s is not None:
        began = datetime.fromtimestamp(report.began_unix_s, UTC)
        since = f" from {began:%Y-%m-%d %H:%M:%S} UTC"
    whole = report.calls[0]
    return (
        f"{report.name}: {report.span_s:.0f} s{since}, {whole.calls} calls to "
        f"{len(report.calls) - 1} deployments, {whole.output_tokens} output tokens."
    )


def tables(report: CellReport, beside: CellReport | None = None) -> list[Table]:
    """The numbers alone, for a terminal."""
    found = [section.table for section in sections(report, beside)]
    return [table for table in found if table is not None and table.rows]


def sections(report: CellReport, beside: CellReport | None = None) -> Iterator[Section]:
    """What there is to show of it."""
    sides = [report, *([beside] if beside else [])]
    yield Section(
        title="What was served",
        notes=("Shares are of the calls that nobody cancelled: a refused one has missed.",),
        table=_served(sides),
        wide=drawn([_attained(sides)]),
        charts=drawn(_distributions(sides, report.calls[0].deployment)),
        folded=tuple(
            (one.deployment, drawn(_distributions(sides, one.deployment)))
            for one in sorted(report.calls[1:], key=lambda c: (-c.calls, c.deployment))
            if one.finished
        )[:DISTRIBUTIONS_MAX],
    )
    if any(side.by_class for side in sides):
        yield of_table(_by_class(sides))
    yield of_table(_refused(sides))
    if any(side.loads for side in sides):
        yield of_table(_loads(sides))
    if any(side.looks for side in sides):
        yield Section(title="Nodes and memory over time", charts=_over_time(sides))
    if any(side.faults for side in sides):
        yield of_table(_faults(sides))


def _served(sides: Sequence[CellReport]) -> Table:
    rows = [
        (name, *((side.name,) if len(sides) > 1 else ()), *_row(one))
        for name in _names(sides)
        for side in sides
        if (one := _of(side, name))
    ]
    headers = ("DEPLOYMENT", *(("RUN",) if len(sides) > 1 else ()), *_SERVED)
    note = (
        "SLO_MET_%: every token in time, or late by no more than was told. MET_IN_THE_MEAN_%: TTFT "
        "and mean TPOT, as the page and /metrics count it, there of finished calls alone."
    )
    return Table(
        title="Deployments",
        note=note,
        headers=headers,
        rows=tuple(rows),
        words=1 if len(sides) == 1 else 2,
    )


def _by_class(sides: Sequence[CellReport]) -> Table:
    rows = [(name, side.name, *_row(one)) for side in sides for name, one in side.by_class.items()]
    return Table(
        title="SLO classes",
        note="Of all deployments: each call by the limits of its class, counted as above.",
        headers=("CLASS", "RUN", *_SERVED),
        rows=tuple(rows),
    )


def _row(one: CallsReport) -> tuple[str, ...]:
    """The cells of _SERVED."""
    return (
        *(str(one.calls), str(one.finished), str(sum(one.refused.values()))),
        *(figure(one.attainment, 1, 100), figure(one.attainment_in_the_mean, 1, 100)),
        *(_at(one.ttft_s, 50, 1), _at(one.ttft_s, 95, 1)),
        *(_at(one.tpot_s, 50, 1000), _at(one.tpot_s, 95, 1000)),
    )


def _refused(sides: Sequence[CellReport]) -> Table:
    rows = []
    for side in sides:
        for one in side.calls:
            for rank, (reason, count) in enumerate(one.refused.items(), start=1):
                share = figure(count / one.calls, 1, 100)
                rows.append((one.deployment, reason, str(rank), str(count), share, side.name))
    return Table(
        title="Refusals by reason",
        note="RANK 1 is the most frequent of its deployment." if rows else "Nothing was refused.",
        headers=("DEPLOYMENT", "REASON", "RANK", "CALLS", "%_OF_CALLS", "RUN"),
        rows=tuple(rows),
    )


def _loads(sides: Sequence[CellReport]) -> Table:
    return Table(
        title="Loads by tier",
        note="From where the weights came.",
        headers=("TIER", "RUN", "LOADS", "MEAN_S"),
        rows=tuple(
            (load.tier, side.name, str(load.loads), f"{load.mean_s:.2f}")
            for side in sides
            for load in side.loads
        ),
    )


def _faults(sides: Sequence[CellReport]) -> Table:
    left_out = sum(side.faults_left_out for side in sides)
    return Table(
        title="Faults",
        note=f"{left_out} earlier ones are left out." if left_out else "In order of time.",
        headers=("AFTER_S", "RUN", "WHAT", "HAPPENED"),
        rows=tuple(
            (f"{fault.at_s:.1f}", side.name, fault.subject, fault.text)
            for side in sides
            for fault in side.faults
        ),
        words=4,
    )


def _attained(sides: Sequence[CellReport]) -> BarChart:
    shown = sorted(sides[0].calls[1:], key=lambda c: (-c.calls, c.deployment))[:BARS_MAX]
    names = [one.deployment for one in shown]
    found = [[_of(side, name) for name in names] for side in sides]
    return BarChart(
        name="slo",
        title="SLO met, every token",
        y_label="% of calls",
        groups=tuple(names),
        bars=tuple(
            Bars(
                name=side.name,
                values=tuple(
                    None if one is None or one.attainment is None else 100 * one.attainment
                    for one in each
                ),
                marks=(None,) * len(names),
            )
            for side, each in zip(sides, found, strict=True)
        ),
        y_most=100.0,
    )


def _distributions(sides: Sequence[CellReport], name: str) -> list[Chart]:
    found = [(side.name, one) for side in sides if (one := _of(side, name))]
    return [
        LineChart(
            name=kind,
            title=f"{title}, {name}: share of all calls",
            x_label=unit,
            y_label="%",
            lines=tuple(
                Line(name=side, points=_curve(one, kind, times))
                for side, one in found
                if getattr(one, f"{kind}_s")
            ),
            log_x=kind == "ttft",
            y_most=100.0,
        )
        for kind, title, unit, times in (
            ("ttft", "TTFT", "seconds", 1.0),
            ("tpot", "Mean TPOT", "milliseconds", 1000.0),
        )
    ]


def _curve(one: CallsReport, kind: str, times: float) -> tuple[tuple[float, float], ...]:
    """The curve ends below 100 % by the calls that have no such time."""
    count, seconds = getattr(one, f"{kind}_count"), getattr(one, f"{kind}_s")
    return tuple((times * s, count / one.judged * percent) for percent, s in enumerate(seconds))


def _over_time(sides: Sequence[CellReport]) -> tuple[Drawn, ...]:
    charts: list[Chart] = []
    for side in sides:
        if not side.looks:
            continue
        minutes = [look.at_s / 60 for look in side.looks]
        seen = [look.gauges for look in side.looks]
        nodes = [
            Line(name=name, points=_points(minutes, [getattr(g, f"nodes_{key}") for g in seen], 1))
            for name, key in (("ready", "ready"), ("in use", "used"))
        ]
        memory = [
            Line(
                name=part.replace("_", " "),
                points=_points(minutes, [getattr(g, f"{part}_bytes") for g in seen], 1 / MIB),
            )
            for part in _PARTS
        ]
        for name, unit, lines in (("Nodes", "nodes", nodes), ("Memory", "MiB", memory)):
            if not any(line.points for line in lines):
                continue
            charts.append(
                LineChart(
                    name=name.lower(),
                    title=f"{name}, {side.name}",
                    x_label="minutes",
                    y_label=unit,
                    lines=tuple(lines),
                )
            )
    return drawn(charts)


def _points(
    xs: Sequence[float], values: Sequence[float | None], times: float
) -> tuple[tuple[float, float], ...]:
    return tuple((x, times * v) for x, v in zip(xs, values, strict=True) if v is not None)


def _names(sides: Sequence[CellReport]) -> list[str]:
    return list(dict.fromkeys(one.deployment for side in sides for one in side.calls))


def _of(side: CellReport, name: str) -> CallsReport | None:
    return next((one for one in side.calls if one.deployment == name), None)


def _at(seconds: Sequence[float], percent: int, times: float) -> str:
    return figure(seconds[percent] if seconds else None, 3, times)
