"""Another model's iterations, from what operators take of those that were counted."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.operator_scaling import by_operators
from mesh.domain.model import Widths
from mesh.domain.operators import Role
from mesh.domain.profile import REST, Grid, OperatorTimes, Profile
from tests.support.profiles import profile

WIDTHS = Widths(
    layers=2,
    hidden_size=4,
    intermediate_size=8,
    attention_heads=2,
    kv_heads=1,
    head_size=2,
    vocabulary_tokens=16,
)
PER_WEIGHT_MS: Mapping[str, float] = {
    Role.QKV: 64,
    Role.OUTPUT: 32,
    Role.GATE_UP: 128,
    Role.DOWN: 64,
    Role.HEAD: 64,
}
"""A millisecond for each weight, in both layers, and in the head."""
OTHERS_MS: Mapping[str, float] = {
    Role.EMBEDDING: 2,
    Role.NORM: 10,
    Role.ROPE: 6,
    Role.ACTIVATION: 12,
    REST: 8,
}
"""As long in any iteration."""
ATTENTION_MS = ((20, 24), (28, 44))
"""One token alone and behind 100, and two."""


def counted() -> Profile:
    """A profile of prompts and decodes of 1 and 2 rows, at 0 and 100 tokens."""

    def grid(cells_ms: tuple[tuple[float, ...], ...]) -> Grid:
        seconds = tuple(tuple(ms / 1e3 for ms in row) for row in cells_ms)
        return Grid(rows=(1, 2), columns=(0, 100), seconds=seconds)

    cells: dict[str, tuple[tuple[float, ...], ...]] = {Role.ATTENTION: ATTENTION_MS}
    for taken in (PER_WEIGHT_MS, OTHERS_MS):
        cells |= {name: ((ms, ms), (ms, ms)) for name, ms in taken.items()}
    whole = tuple(tuple(sum(c[i][j] for c in cells.values()) for j in (0, 1)) for i in (0, 1))
    times = [OperatorTimes(name=n, prefill=grid(c), decode=grid(c)) for n, c in cells.items()]
    made = profile(prefill=grid(whole), decode=grid(whole))
    return replace(made, operators=tuple(times), widths=WIDTHS)


@pytest.mark.parametrize(
    ("changed", "one_ms", "two_ms"),
    [
        # Everything in layers is there twice: (288 + 36 + attention) more.
        ({"layers": 4}, 410 + 344, 434 + 368),
        ({"vocabulary_tokens": 32}, 410 + 64, 434 + 64),
        # Gate, up and down; what one row of the activation takes goes with the layers.
        ({"intermediate_size": 16}, 410 + 192, 434 + 192),
        # Queries are 4 of 8 columns of QKV, all of the output, and what attention adds to one row.
        ({"attention_heads": 4}, 410 + 32 + 32, 434 + 32 + 32 + 24),
        ({"kv_heads": 2}, 410 + 32, 434 + 32),
        ({"hidden_size": 8}, 410 + 352, 434 + 352),
    ],
)
def test_each_operator_goes_with_its_own_sizes(
    changed: dict[str, int], one_ms: float, two_ms: float
) -> None:
    """One token alone takes 410 ms in all, two behind a hundred each 434."""
    widths = replace(WIDTHS, **changed)
    for grid in by_operators(counted(), widths):
        assert grid.at(1, 0) == pytest.approx(one_ms / 1e3)
        assert grid.at(2, 100) == pytest.approx(two_ms / 1e3)


def test_what_a_later_survey_has_told_is_kept_and_ratios_hold_beyond_what_was_counted() -> None:
    finer = Grid(
        rows=(1, 2, 64), columns=(0, 50, 400), seconds=((0.5, 0.6, 0.7),) * 2 + ((5.0, 6.0, 7.0),)
    )
    known = replace(counted(), prefill=finer)
    prefill, _ = by_operators(known, replace(WIDTHS, vocabulary_tokens=32))
    assert (prefill.rows, prefill.columns) == (finer.rows, finer.columns)
    assert prefill.at(1, 0) == pytest.approx(0.5 * 474 / 410)
    assert prefill.at(64, 400) == pytest.approx(7.0 * 498 / 434)


@given(
    st.fixed_dictionaries(
        {name: st.integers(1, 64) for name in ("layers", "hidden_size", "intermediate_size")}
        | {name: st.integers(1, 16) for name in ("attention_heads", "kv_heads", "head_size")}
        | {"vocabulary_tokens": st.integers(1, 4096)}
    )
)
def test_times_ascend_and_its_own_widths_have_the_profile_itself(
    sizes: dict[str, int],
) -> None:
    known = counted()
    for grid in by_operators(known, Widths(**sizes)):
        assert grid.seconds[0][0] > 0.0
        assert all(list(row) == sorted(row) for row in grid.seconds)
        assert all(list(column) == sorted(column) for column in zip(*grid.seconds, strict=True))
    same = by_operators(known, WIDTHS)
    for grid, own in zip(same, (known.prefill, known.decode), strict=True):
        for row, own_row in zip(grid.seconds, own.seconds, strict=True):
            assert row == pytest.approx(own_row)
