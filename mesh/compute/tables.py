"""From single measured times to a table: noise is smoothed, what was not measured is filled.

Comes after `mesh.compute.survey`. Physics gives both rules. A larger batch, chunk or context never
takes less time, so that times are made monotone. And an iteration reads the KV cache of its
requests once, so that its time grows linearly along the context axis, and that growth in
proportion to the rows (requests or prompt tokens that attend to the cache).
"""

from collections.abc import Sequence

from mesh.domain.profile import Grid

Row = Sequence[float | None]


def table(rows: Sequence[int], columns: Sequence[int], measured: Sequence[Row]) -> Grid | None:
    """`measured[i][j]` seconds at `rows[i]` and `columns[j]`, None where there are none.

    Rows without any are left out: between and below its rows a grid interpolates by itself, and
    above the last it answers in proportion. None when nothing is left.
    """
    known = [i for i, row in enumerate(measured) if any(value is not None for value in row)]
    if not known:
        return None
    sizes = [rows[i] for i in known]
    seconds = _filled(sizes, columns, _smoothed([measured[i] for i in known]))
    return Grid(rows=tuple(sizes), columns=tuple(columns), seconds=monotone(seconds))


def _smoothed(measured: Sequence[Row]) -> list[list[float | None]]:
    """Monotone along both axes, by means instead of maxima: over a stretch of equal times a running
    maximum would answer with the noisiest of them.

    Smoothing along one axis keeps the order along the other: isotonic regression of larger values
    gives larger values.
    """
    by_row = [_isotonic(row) for row in measured]
    by_column = [_isotonic(column) for column in zip(*by_row, strict=True)]
    return [list(row) for row in zip(*by_column, strict=True)]


def _isotonic(values: Row) -> list[float | None]:
    """The nearest ascending values (least squares), by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values:
        if value is None:
            continue
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean = (mean * count + before * many) / (count + many)
            count += many
        pools.append((mean, count))
    ascending = iter([mean for mean, count in pools for _ in range(count)])
    return [None if value is None else next(ascending) for value in values]


def _filled(
    sizes: Sequence[int], columns: Sequence[int], measured: Sequence[Row]
) -> list[list[float]]:
    """Every row completed from its own growth, or from that of the nearest row that has one."""
    points = [
        [(column, value) for column, value in zip(columns, row, strict=True) if value is not None]
        for row in measured
    ]
    slopes = [_slope(row) for row in points]
    grown = [i for i, slope in enumerate(slopes) if slope is not None]
    seconds = []
    for i, row in enumerate(points):
        slope = slopes[i]
        if slope is None:
            near = min(grown, key=lambda j: (abs(j - i), j), default=i)
            slope = (slopes[near] or 0.0) * sizes[i] / sizes[near]
        seconds.append([_at(row, column, slope) for column in columns])
    return seconds


def _slope(points: Sequence[tuple[int, float]]) -> float | None:
    """Seconds per context token, by least squares over all points: the two last alone would have
    their noise multiplied with every column that is filled. None for a single point.
    """
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return max(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0)


def _at(points: Sequence[tuple[int, float]], column: int, slope: float) -> float:
    """A row's seconds at a column: measured, between its neighbours, or beyond the last."""
    left = points[0]
    for right in points:
        if right[0] == column:
            return right[1]
        if right[0] > column:
            if right is left:
                return right[1]
            part = (column - left[0]) / (right[0] - left[0])
            return left[1] + (right[1] - left[1]) * part
        left = right
    return left[1] + slope * (column - left[0])


def monotone(seconds: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """The running maximum along both axes; what was measured ascends already."""
    result: list[tuple[float, ...]] = []
    above = [0.0] * len(seconds[0])
    for row in seconds:
        least = 0.0
        ascending = []
        for value, floor in zip(row, above, strict=True):
            least = max(least, value, floor)
            ascending.append(least)
        above = ascending
        result.append(tuple(ascending))
    return tuple(result)
