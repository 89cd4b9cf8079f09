"""The page of `mesh bench operators`: a chart of devices, energy and memory for each figure of the
paper, with both accountings in each, and a table of all cells.

Before: `mesh.evaluation.operators`. After: `mesh.report.charts.page`, which lays it out.
"""

from collections.abc import Callable
from itertools import product

from mesh.evaluation.operators import CONSERVING, PAPER, Cell, Found
from mesh.report.charts.chart import BarChart, Bars
from mesh.report.charts.page import Section, Table, drawn, file_name, of_table, render

SHOWN = tuple(product((PAPER, CONSERVING), ("model", "model-shared", "operators")))
MEASURES: tuple[tuple[str, str, Callable[[Cell], float]], ...] = (
    ("devices", "devices", lambda cell: cell.devices),
    ("energy", "J a request", lambda cell: cell.energy_j),
    ("memory", "GB", lambda cell: cell.memory_bytes / 1e9),
    ("kept when executed", "% of the requests", lambda cell: 100 * cell.executed.met),
)
HEADERS = (
    *("figure", "point", "accounting", "planner", "devices", "replicas", "GB", "J a request"),
    *("expected, ms", "executed, ms", "met, %"),
)
ABOUT = (
    "Operator-level autoscaling by its paper's formulas and with device time conserved, on {}s.",
    "Every plan was executed in simulation; no engine of mesh runs single operators.",
)


def rows(found: Found) -> list[tuple[str, ...]]:
    """A row for each cell, with the columns of HEADERS."""
    return [
        (
            *(point.figure, point.name, accounting, name, str(cell.devices), str(cell.sum_pr)),
            *(f"{cell.memory_bytes / 1e9:.0f}", f"{cell.energy_j:.1f}"),
            *(f"{1e3 * cell.expected_s:.1f}", f"{1e3 * cell.executed.mean_s:.1f}"),
            f"{100 * cell.executed.met:.1f}",
        )
        for point, by in found.items()
        for accounting, planners in by.items()
        for name, cell in planners.items()
    ]


def page(found: Found) -> str:
    """The page, which needs no other file."""
    figures = list(dict.fromkeys(point.figure for point in found))
    every = Table(title="All cells", note="", headers=HEADERS, rows=tuple(rows(found)), words=4)
    sections = [Section(title=of, charts=drawn(charts(found, of))) for of in figures]
    devices = ", ".join(dict.fromkeys(point.device.upper() for point in found))
    about = tuple(line.format(devices) for line in ABOUT)
    return render("Operators", about, [*sections, of_table(every)])


def charts(found: Found, figure: str) -> list[BarChart]:
    """The charts of a figure: its points are the groups."""
    at = [point for point in found if point.figure == figure]
    return [
        BarChart(
            name=file_name(f"{figure} {title}"),
            title=f"{figure}: {title}",
            y_label=unit,
            groups=tuple(point.name for point in at),
            bars=tuple(
                Bars(
                    name=f"{name}, {accounting}",
                    values=tuple(value(found[point][accounting][name]) for point in at),
                    marks=(None,) * len(at),
                )
                for accounting, name in SHOWN
            ),
        )
        for title, unit, value in MEASURES
    ]
