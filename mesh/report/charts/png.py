"""Draws charts with matplotlib, one PNG each. Nothing opens a window.

Whoever asks for plots imports this module then: matplotlib is an extra (`plot`) that serving does
without. Before: `charts`. After: files.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mesh.report.charts.chart import BarChart, Chart, LineChart, log_ticks, x_range, y_top

HEIGHT_INCHES = 3.6
WIDTH_INCHES, BAR_WIDTH_INCHES = 8.0, 12.0
DOTS_PER_INCH = 120
BAR_MOST_SHARE = 0.05
"""The most that one bar may take of the width of all groups."""

# Its remarks on fonts and caches are no messages of ours.
logging.getLogger("matplotlib").setLevel(logging.ERROR)


def draw_all(charts: Iterable[tuple[str, Chart]], folder: Path) -> list[Path]:
    """(heading, chart) each as FOLDER/NAME.png, in a folder that is there. Raises OSError."""
    paths = []
    for heading, chart in charts:
        path = folder / f"{chart.name}.png"
        draw(heading, chart, path)
        paths.append(path)
    return paths


def draw(heading: str, chart: Chart, path: Path) -> None:
    """Raises OSError."""
    width = BAR_WIDTH_INCHES if isinstance(chart, BarChart) else WIDTH_INCHES
    figure = Figure(figsize=(width, HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(f"{heading}: {chart.title}" if heading else chart.title, parse_math=False)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(0, y_top(chart))
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", alpha=0.4)
    if isinstance(chart, BarChart):
        _bars(axes, chart)
    else:
        _lines(axes, chart)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _lines(axes: Axes, chart: LineChart) -> None:
    for line in chart.lines:
        axes.plot([x for x, _ in line.points], [y for _, y in line.points], label=line.name)
    low, high = x_range(chart)
    if chart.log_x:
        axes.set_xscale("log")
        axes.set_xticks(log_ticks(low, high))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_xlim(low, high)
    axes.set_xlabel(chart.x_label)
    if chart.x_limit is not None:
        axes.axvline(chart.x_limit, color="black", linestyle="--", linewidth=0.8)


def _bars(axes: Axes, chart: BarChart) -> None:
    wide = min(0.82 / max(len(chart.bars), 1), BAR_MOST_SHARE * max(len(chart.groups), 1))
    for number, bars in enumerate(chart.bars):
        offset = wide * (number + 0.5 - len(chart.bars) / 2)
        middles = [place + offset for place in range(len(chart.groups))]
        heights = [value or 0.0 for value in bars.values]
        axes.bar(middles, heights, width=wide * 0.9, label=bars.name)
        for middle, mark in zip(middles, bars.marks, strict=True):
            if mark is not None:
                axes.hlines(mark, middle - wide / 2, middle + wide / 2, color="black")
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    axes.set_xlim(-0.5, len(chart.groups) - 0.5)
