"""Tables from measured times: smoothed, filled, monotone."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.tables import table

ROWS, COLUMNS = (1, 2, 4, 8), (32, 64, 128, 256, 512)
TIME = st.none() | st.floats(1e-4, 10.0)
MEASURED = st.lists(
    st.lists(TIME, min_size=len(COLUMNS), max_size=len(COLUMNS)),
    min_size=len(ROWS),
    max_size=len(ROWS),
)


def linear_s(row: int, column: int) -> float:
    """Weights, work per row, and KV reads: linear along the context axis."""
    return 0.01 + 0.002 * row + 1e-5 * row * column


def lines(*missing: tuple[int, int]) -> list[list[float | None]]:
    return [
        [None if (row, column) in missing else linear_s(row, column) for column in COLUMNS]
        for row in ROWS
    ]


@given(MEASURED)
def test_a_table_is_monotone_whatever_was_measured(measured: list[list[float | None]]) -> None:
    grid = table(ROWS, COLUMNS, measured)
    if grid is None:
        assert all(value is None for row in measured for value in row)
        return
    for row in grid.seconds:
        assert all(left <= right for left, right in pairwise(row))
    for column in zip(*grid.seconds, strict=True):
        assert all(above <= below for above, below in pairwise(column))


@given(MEASURED)
def test_no_cell_is_less_than_the_least_time_measured(measured: list[list[float | None]]) -> None:
    times = [value for row in measured for value in row if value is not None]
    grid = table(ROWS, COLUMNS, measured)
    if grid is not None:
        assert min(map(min, grid.seconds)) >= min(times) * (1 - 1e-9)


def test_what_ascends_already_is_kept_as_it_is() -> None:
    grid = table(ROWS, COLUMNS, lines())
    assert grid is not None
    assert [list(row) for row in grid.seconds] == lines()


def test_noise_around_equal_times_is_averaged() -> None:
    """A running maximum would answer with 0.012 for all but the first."""
    grid = table((1,), COLUMNS, [[0.011, 0.012, 0.010, 0.009, 0.008]])
    assert grid is not None
    assert grid.seconds[0] == pytest.approx((0.010,) * 5)


@pytest.mark.parametrize(
    "missing",
    [
        [(8, 512), (8, 256), (4, 512)],
        [(8, 64), (2, 128), (2, 256)],
        [(8, column) for column in COLUMNS[1:]],
    ],
    ids=["beyond the last", "between", "from the neighbour's growth"],
)
def test_missing_cells_are_filled_along_the_context(missing: list[tuple[int, int]]) -> None:
    grid = table(ROWS, COLUMNS, lines(*missing))
    assert grid is not None
    for row, column in missing:
        got = grid.seconds[ROWS.index(row)][COLUMNS.index(column)]
        assert got == pytest.approx(linear_s(row, column))


def test_a_row_without_times_is_left_out() -> None:
    grid = table(ROWS, COLUMNS, lines(*((4, column) for column in COLUMNS)))
    assert grid is not None
    assert grid.rows == (1, 2, 8)


def test_single_points_without_any_growth_stay_as_they_are() -> None:
    grid = table((1, 2), (32, 64), [[None, 0.01], [0.02, None]])
    assert grid is not None
    assert grid.seconds == ((0.01, 0.01), (0.02, 0.02))
