"""Tables of iteration times and what they answer between, below and above their points."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.profile import Grid
from tests.support.profiles import profile

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Grids whose times ascend along both axes, as those of a survey do."""
    rows, columns = draw(SIZES), draw(SIZES)
    step = st.floats(0.0, 1.0)
    seconds: list[list[float]] = []
    for i in range(len(rows)):
        line: list[float] = []
        for j in range(len(columns)):
            above = seconds[i - 1][j] if i else 1e-4
            left = line[j - 1] if j else 1e-4
            line.append(max(above, left) + draw(step))
        seconds.append(line)
    return Grid(rows=tuple(rows), columns=tuple(columns), seconds=tuple(map(tuple, seconds)))


def transposed(grid: Grid) -> Grid:
    return Grid(
        rows=grid.columns, columns=grid.rows, seconds=tuple(zip(*grid.seconds, strict=True))
    )


SIZE = st.floats(0.0, 20_000.0)


@given(grids())
def test_a_grid_answers_its_points_exactly(grid: Grid) -> None:
    for i, row in enumerate(grid.rows):
        for j, column in enumerate(grid.columns):
            assert grid.at(row, column) == grid.seconds[i][j]


@given(grids(), SIZE, SIZE, SIZE)
def test_a_larger_size_never_takes_less(grid: Grid, one: float, other: float, fixed: float) -> None:
    small, large = sorted((one, other))
    assert grid.at(small, fixed) <= grid.at(large, fixed) * (1 + 1e-9)
    assert grid.at(fixed, small) <= grid.at(fixed, large) * (1 + 1e-9)


@given(grids(), SIZE, SIZE)
def test_both_axes_are_treated_alike(grid: Grid, row: float, column: float) -> None:
    assert transposed(grid).at(column, row) == pytest.approx(grid.at(row, column))


@given(grids(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_between_four_points_the_answer_is_bilinear(grid: Grid, share: float, part: float) -> None:
    for i, (low, high) in enumerate(pairwise(grid.rows)):
        for j, (left, right) in enumerate(pairwise(grid.columns)):
            (a, b), (c, d) = grid.seconds[i][j : j + 2], grid.seconds[i + 1][j : j + 2]
            expected = (a * (1 - part) + b * part) * (1 - share) + (
                c * (1 - part) + d * part
            ) * share
            got = grid.at(low + (high - low) * share, left + (right - left) * part)
            assert got == pytest.approx(expected)


@given(grids())
def test_below_its_first_point_a_grid_answers_with_that(grid: Grid) -> None:
    assert grid.at(0, 0) == grid.seconds[0][0]
    assert grid.at(grid.rows[-1], 0) == grid.seconds[-1][0]
    assert grid.at(0, grid.columns[-1]) == grid.seconds[0][-1]


@given(grids(), st.floats(1.0, 10.0), st.floats(1.0, 10.0))
def test_above_its_last_point_a_grid_answers_in_proportion(
    grid: Grid, more_rows: float, more_columns: float
) -> None:
    last = grid.seconds[-1][-1]
    got = grid.at(grid.rows[-1] * more_rows, grid.columns[-1] * more_columns)
    assert got == pytest.approx(last * more_rows * more_columns)


def test_a_grid_of_the_single_column_0_holds_for_every_size_along_it() -> None:
    grid = Grid(rows=(1, 128), columns=(0,), seconds=((0.01,), (0.1,)))
    assert grid.at(128, 0) == grid.at(128, 4000) == 0.1


def test_a_profile_is_measured_unless_it_says_what_it_was_scaled_from() -> None:
    assert profile().measured
    assert not profile(scaled_from="another").measured
