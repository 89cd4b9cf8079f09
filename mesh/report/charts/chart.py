"""Charts as values, and the ticks of their axes: what is drawn, not how; pure.

Before: whoever has something to show. After: `svg` (a page) and `png` (files), which draw the same
charts.
"""

import math

from mesh.domain.values import dataclass

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    points: Points
    """(x, y), x ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """`name` is good for a file name. An axis starts at 0, or where its logarithm begins."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    y_most: float | None = None
    """The top of the axis; `None` stands for the highest point of the lines."""
    x_limit: float | None = None
    """An SLO, drawn as an upright line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar in each group; None where there is none. `marks` are others' values for them."""

    name: str
    values: tuple[float | None, ...]
    marks: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    name: str
    title: str
    y_label: str
    groups: tuple[str, ...]
    bars: tuple[Bars, ...]
    y_most: float | None = None


Chart = LineChart | BarChart


def x_range(chart: LineChart) -> tuple[float, float]:
    """The least and the largest x of all lines; the range is never empty."""
    xs = [x for line in chart.lines for x, _ in line.points]
    if chart.x_limit is not None:
        xs.append(chart.x_limit)
    if not chart.log_x:
        return 0.0, max([*xs, 1e-9])
    above = [x for x in xs if x > 0] or [1.0]
    return min(above) / 1.2, max(above) * 1.2


def y_top(chart: Chart) -> float:
    """The top of the axis: `y_most`, or a little above the highest point, bar or mark."""
    if chart.y_most is not None:
        return chart.y_most
    if isinstance(chart, LineChart):
        values = [y for line in chart.lines for _, y in line.points]
    else:
        each = [(*bars.values, *bars.marks) for bars in chart.bars]
        values = [value for row in each for value in row if value is not None]
    return max([*values, 1e-9]) * 1.05


def ticks(top: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to `top`, about so many."""
    raw = top / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    return [step * n for n in range(int(top / step * 1.0001) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade within; only 1 where there are more than three decades."""
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**decade for decade in decades for factor in factors]
    return [tick for tick in found if low <= tick <= high]
