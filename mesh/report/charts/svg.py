"""Draws charts as SVG for a page: shapes and text alone, colours by the page's style sheet.

A series has class `s0`, `s1` and so on; the page gives them colours for light and for dark, so that
nothing here knows of either. Before: `charts`. After: `page`.
"""

import math
from collections.abc import Callable, Iterable
from html import escape

from mesh.report.charts.chart import BarChart, Chart, LineChart, log_ticks, ticks, x_range, y_top

WIDTH, HEIGHT = 560, 260
BAR_WIDTH = 1140
"""The width of a whole chart of bars, in the page's pixels before it is scaled."""
BAR_MOST = 56
"""The most width of one bar and the gap beside it."""
CHAR_WIDTH = 6.5
"""That of a letter of the page's labels."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 36
SERIES_MAX = 8
"""Colours of a page; a later series begins with the first again."""
DASHES = ("none", "6 4", "2 3", "10 3 2 3", "1 4", "12 4", "4 2 1 2", "8 2 2 2 2 2")
"""By which lines of these colours differ, too."""

Scale = Callable[[float], float]


def names(chart: Chart) -> list[str]:
    """For a legend, in the order of their colours."""
    if isinstance(chart, BarChart):
        return [bars.name for bars in chart.bars]
    return [line.name for line in chart.lines]


def svg(chart: Chart) -> str:
    """An element <svg> that fills its column. The title and the legend are the page's matter."""
    width = BAR_WIDTH if isinstance(chart, BarChart) else WIDTH
    top = y_top(chart)

    def y(value: float) -> float:
        share = min(max(value / top, 0.0), 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    shapes = [*_y_axis(chart.y_label, top, y, width)]
    if isinstance(chart, BarChart):
        shapes += _bars(chart, y)
    else:
        shapes += _lines(chart, y)
    body = "\n".join(shapes)
    label = escape(chart.title, quote=True)
    return f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'


def _y_axis(label: str, top: float, y: Scale, width: int) -> Iterable[str]:
    for tick in ticks(top):
        at = y(tick)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{width - RIGHT}"/>'
        yield _text(LEFT - 5, at + 3.5, f"{tick:g}", "end")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text transform="translate(11 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(label)}</text>"
    )


def _lines(chart: LineChart, y: Scale) -> Iterable[str]:
    low, high = x_range(chart)
    span = WIDTH - LEFT - RIGHT

    def x(value: float) -> float:
        if chart.log_x:
            share = math.log(max(value, low) / low) / math.log(high / low)
        else:
            share = value / high
        return LEFT + share * span

    base = HEIGHT - BOTTOM
    for tick in log_ticks(low, high) if chart.log_x else ticks(high, 6):
        yield f'<path class="grid" d="M{x(tick):.1f} {base}v4"/>'
        yield _text(x(tick), base + 16, f"{tick:g}", "middle")
    yield _text(LEFT + span / 2, HEIGHT - 4, chart.x_label, "middle")
    if chart.x_limit is not None:
        yield f'<path class="limit" d="M{x(chart.x_limit):.1f} {TOP}V{base}"/>'
    for number, line in enumerate(chart.lines):
        if line.points:
            path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line.points)
            yield f'<path class="line s{number % SERIES_MAX}" d="M{path}"/>'


def _bars(chart: BarChart, y: Scale) -> Iterable[str]:
    base = HEIGHT - BOTTOM
    group_width = (BAR_WIDTH - LEFT - RIGHT) / max(len(chart.groups), 1)
    wide = min(group_width * 0.82 / max(len(chart.bars), 1), BAR_MOST)
    for place, group in enumerate(chart.groups):
        begin = LEFT + group_width * (place + 0.5) - wide * len(chart.bars) / 2
        words = _fitted(group, group_width)
        yield _text(LEFT + group_width * (place + 0.5), base + 16, words, "middle")
        for number, bars in enumerate(chart.bars):
            left, value, mark = begin + wide * number, bars.values[place], bars.marks[place]
            if value is not None:
                words = escape(f"{group} {bars.name}: {value:.4g}")
                yield (
                    f'<rect class="bar s{number % SERIES_MAX}" x="{left:.1f}" y="{y(value):.1f}" '
                    f'width="{wide * 0.9:.1f}" height="{base - y(value):.1f}">'
                    f"<title>{words}</title></rect>"
                )
            if mark is not None:
                yield f'<path class="mark" d="M{left - 1:.1f} {y(mark):.1f}h{wide * 0.9 + 2:.1f}"/>'


def _fitted(words: str, width: float) -> str:
    """The beginning and the end where there is no room for all: names like each other often differ
    at the end.
    """
    most = max(int(width / CHAR_WIDTH), 3)
    if len(words) <= most:
        return words
    end = most // 2
    return f"{words[: most - 1 - end]}…{words[-end:]}"


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
