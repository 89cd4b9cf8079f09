"""What iterations tell of a profile: it converges, resists outliers, and stays a table."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.learned_correction import LearnedCorrection
from mesh.compute.refining import SHIFT_MAX, Refinement, taken_up
from mesh.compute.times import Times
from mesh.domain.ids import ModelId
from mesh.domain.profile import Grid, IterationShape, Profile
from mesh.domain.reasons import DeviceKind

DECODE = Grid(
    rows=(1, 4, 16),
    columns=(32, 512),
    seconds=((0.010, 0.012), (0.013, 0.018), (0.020, 0.035)),
)
PREFILL = Grid(
    rows=(1, 64, 256), columns=(0, 512), seconds=((0.01, 0.01), (0.04, 0.05), (0.15, 0.2))
)
PROFILE = Profile(
    model_id=ModelId("m"),
    device=DeviceKind.CPU,
    fingerprint="cpu",
    hardware="a CPU",
    cores=2,
    parameters=1,
    weights_bytes=1,
    kv_bytes_per_token=1,
    prefill=PREFILL,
    decode=DECODE,
)


def decode(batch: int, context_tokens: int) -> IterationShape:
    return IterationShape(decode_batch=batch, decode_context_tokens=context_tokens)


def prefill(tokens: int, past_tokens: int) -> IterationShape:
    return IterationShape(prefill_tokens=tokens, prefill_past_tokens=past_tokens)


def off_by(row: int) -> float:
    """The table is right for small batches and a fifth too low for large ones."""
    return 1.0 + 0.2 * min(row - 1, 15) / 15


def learned(
    seconds: float, disturbed: Callable[[random.Random, float], float], seed: int = 1
) -> Refinement:
    """Decodes of batches of 1 to 16 for so many seconds, each as long as `disturbed` says of what
    it takes alone.
    """
    draw, refinement, spent_s = random.Random(seed), Refinement(PROFILE), 0.0
    while spent_s < seconds:
        batch, context = draw.randint(1, 16), draw.randint(32, 512)
        alone_s = DECODE.at(batch, context) * off_by(batch) * exp(draw.gauss(0.0, 0.05))
        refinement.note(decode(batch, context), disturbed(draw, alone_s), 1.0)
        spent_s += alone_s
    return refinement


def told(refinement: Refinement) -> Profile | None:
    """After a first look, which tells nothing."""
    assert refinement.refined(0.0) is None
    return refinement.refined(60.0)


def worst_error(found: Profile | None) -> float:
    grid = DECODE if found is None else found.decode
    sizes = [(batch, context) for batch in (1, 2, 4, 8, 12, 16) for context in (32, 200, 512)]
    return max(abs(grid.at(b, c) / (DECODE.at(b, c) * off_by(b)) - 1.0) for b, c in sizes)


class Node:
    """Decodes one batch, and predicts it by what it learns of it."""

    def __init__(self) -> None:
        self.profile = PROFILE
        self.refinement = Refinement(PROFILE)
        self.correction = LearnedCorrection()
        self.now_s = 100.0

    def compute(self, seconds: float, slowdown: float) -> None:
        until_s, shape, measured_s = self.now_s + seconds, decode(4, 32), 0.013 * slowdown
        while self.now_s < until_s:
            self.now_s += measured_s
            predicted_s = self.profile.decode.at(4, 32)
            self.refinement.note(shape, measured_s, self.correction.factor(self.now_s - measured_s))
            self.correction.observe(measured_s, predicted_s, self.now_s, shape)
            refined = self.refinement.refined(self.now_s)
            if refined is not None:
                self.correction.refined(Times(self.profile), Times(refined))
                self.profile, self.refinement = refined, Refinement(refined)

    @property
    def moved(self) -> float:
        return self.profile.decode.at(4, 32) / 0.013


def test_a_minute_of_iterations_finds_where_the_table_is_off() -> None:
    assert worst_error(None) > 0.15
    refined = told(learned(60.0, lambda _, alone_s: alone_s))
    assert refined is not None
    assert worst_error(refined) < 0.04
    assert refined.prefill == PREFILL, "nothing was told of prompts"


def test_a_third_of_outliers_moves_it_little() -> None:
    def held_up(draw: random.Random, alone_s: float) -> float:
        return alone_s * 6.0 if draw.random() < 0.3 else alone_s

    assert worst_error(told(learned(60.0, held_up))) < 0.08


def test_a_neighbour_that_the_factor_knows_of_moves_it_slowly() -> None:
    """Twice as slow for ten seconds, as the factor says; and where it does not, for contrast."""
    for factor, low, high in ((2.0, 0.0, 0.03), (1.0, 0.3, SHIFT_MAX)):
        refinement, spent_s = Refinement(PROFILE), 0.0
        while spent_s < 10.0:
            refinement.note(decode(4, 32), 2 * 0.013, factor)
            spent_s += 0.013
        refined = told(refinement)
        moved = 0.0 if refined is None else log(refined.decode.at(4, 32) / 0.013)
        assert low <= moved <= high


@pytest.mark.parametrize("too_slow", [1.1, 1.35, 1.8])
def test_a_table_that_is_too_slow_is_mended_within_half_a_minute_though_the_factor_explains_it(
    too_slow: float,
) -> None:
    """No neighbour makes iterations quicker."""
    node = Node()
    for _ in range(3):
        node.compute(10.0, 1.0 / too_slow)
    assert node.moved == pytest.approx(1.0 / too_slow, rel=0.05)


def test_a_neighbour_of_a_minute_moves_a_table_by_an_eighth_and_is_soon_given_back() -> None:
    """One that comes and goes moves it by less."""
    node = Node()
    for _ in range(6):
        node.compute(10.0, 2.0)
    assert 1.02 < node.moved < 1.17
    node.compute(11.0, 1.0)
    assert node.moved == pytest.approx(1.0, abs=0.05)
    for _ in range(10):
        node.compute(5.0, 1.5)
        node.compute(7.0, 1.0)
        assert node.moved == pytest.approx(1.0, abs=0.08)


def test_nothing_is_told_while_the_table_is_right() -> None:
    refinement = Refinement(PROFILE)
    for _ in range(10_000):
        refinement.note(decode(4, 32), 0.013, 1.0)
        refinement.note(prefill(64, 0), 0.04, 1.0)
        refinement.note(IterationShape(prefill_tokens=64, decode_batch=4), 9.0, 1.0)
    assert told(refinement) is None


def test_prompts_and_decodes_are_told_apart() -> None:
    refinement = Refinement(PROFILE)
    for _ in range(300):
        refinement.note(prefill(64, 0), 0.05, 1.0)
    refined = told(refinement)
    assert refined is not None
    assert refined.decode == DECODE
    assert refined.prefill.at(64, 0) == pytest.approx(0.05, rel=0.03)


SECONDS = st.floats(0.0, 100.0)
ITERATIONS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 9000), SECONDS, st.floats(0.25, 8.0)),
    max_size=60,
)


@given(ITERATIONS, ITERATIONS)
def test_whatever_it_is_told_it_stays_a_table_within_bounds(
    decodes: list[tuple[int, int, float, float]], prefills: list[tuple[int, int, float, float]]
) -> None:
    refinement = Refinement(PROFILE)
    for iteration in decodes:
        refinement.note(decode(*iteration[:2]), *iteration[2:])
    for iteration in prefills:
        refinement.note(prefill(*iteration[:2]), *iteration[2:])
    refined = told(refinement)
    if refined is None:
        return
    for grid, before in ((refined.decode, DECODE), (refined.prefill, PREFILL)):
        for row, times in enumerate(grid.seconds):
            assert list(times) == sorted(times)
            if row:
                assert all(a <= b for a, b in zip(grid.seconds[row - 1], times, strict=True))
            for column, point_s in enumerate(times):
                least = before.seconds[row][column] * exp(-SHIFT_MAX)
                assert least <= point_s * (1 + 1e-9)
        assert max(map(max, grid.seconds)) <= max(map(max, before.seconds)) * 2 * (1 + 1e-9)


@given(st.floats(1e-4, 10.0), st.floats(0.25, 8.0))
def test_one_iteration_moves_a_point_by_no_more_than_its_part(
    measured_s: float, factor: float
) -> None:
    refinement = Refinement(PROFILE)
    refinement.note(decode(4, 32), measured_s, factor)
    refinement.note(decode(4, 32), measured_s, factor)
    assert told(refinement) is None, "two iterations are never worth telling"


def test_what_two_nodes_move_little_by_little_is_kept_as_both_have_it() -> None:
    """Though what is kept is neither's, since each has moved another point far, once."""

    def longer(profile: Profile, by: float, *, far: tuple[int, int] | None) -> Profile:
        seconds = [[by * s for s in row] for row in profile.decode.seconds]
        if far is not None:
            seconds[far[0]][far[1]] *= 1.2
        rows = tuple(tuple(row) for row in seconds)
        return replace(profile, decode=replace(profile.decode, seconds=rows))

    kept = first = second = PROFILE
    for step in range(10):
        told = longer(first, 1.035, far=None if step else (2, 0))
        kept, first = taken_up(kept, first, told), told
        told = longer(second, 1.03, far=None if step else (2, 1))
        kept, second = taken_up(kept, second, told), told
    least, most = sorted(node.decode.at(4, 32) for node in (first, second))
    assert least * 0.96 <= kept.decode.at(4, 32) <= most * 1.04
