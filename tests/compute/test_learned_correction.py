"""What a node learns of its speed: promises hold on to neighbours, and stalls are left out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.correction import RATIO_MAX, RATIO_MIN, TRIAL_ITERATIONS
from mesh.compute.learned_correction import (
    SLOT_S,
    STALL_RATIO,
    STALL_S_LEAST,
    WINDOW_S,
    LearnedCorrection,
)
from mesh.compute.times import Times
from mesh.domain.profile import Grid, IterationShape, Stalls
from tests.compute.test_survey import DECODE, PREFILL, PROFILE, decode, prefill

DECODE_S = st.floats(0.004, 0.08)
"""Long enough to be computed in earnest, and short enough for ten of them in a second."""


class Node:
    """Computes iterations back to back."""

    def __init__(self, *, guessed: bool = False, predicted_s: float = 0.01) -> None:
        self.correction = LearnedCorrection(guessed=guessed)
        self.now_s = 100.0
        self.predicted_s = predicted_s

    def iterate(self, slowdown: float, lost_s: float = 0.0) -> None:
        measured_s = self.predicted_s * slowdown + lost_s
        self.now_s += measured_s
        self.correction.observe(measured_s, self.predicted_s, self.now_s)

    def compute(self, seconds: float, slowdown: float = 1.0) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.iterate(slowdown)

    def stall(self, lost_s: float = 1.0) -> None:
        self.iterate(1.0, lost_s)

    @property
    def factor(self) -> float:
        return self.correction.factor(self.now_s)

    @property
    def planned(self) -> float:
        return self.correction.planned(self.now_s)

    @property
    def stalls(self) -> Stalls:
        return self.correction.stalls(self.now_s)


@given(DECODE_S, st.floats(0.0, 30.0), st.floats(0.3, 10.0))
def test_a_single_stall_says_nothing(predicted_s: float, before_s: float, lost_s: float) -> None:
    """Whenever it comes, even in the first iteration, and however long it is."""
    node = Node(predicted_s=predicted_s)
    node.compute(before_s)
    node.stall(lost_s)
    assert node.factor == node.planned == pytest.approx(1.0)
    node.compute(0.5)
    assert node.factor == node.planned == pytest.approx(1.0)
    assert node.stalls.count == 1
    assert node.stalls.longest_s == pytest.approx(lost_s)
    assert node.stalls.ago_s == pytest.approx(0.5, abs=predicted_s)


@given(st.floats(0.004, 0.02), st.floats(2.1, 6.0))
def test_a_second_in_which_every_iteration_is_slow_is_over_after_another_two(
    predicted_s: float, slowdown: float
) -> None:
    """The factor follows it, and falls; both are less than the part that a quantile leaves out."""
    node = Node(predicted_s=predicted_s)
    node.compute(WINDOW_S)
    node.compute(1.0, slowdown)
    assert node.planned > 1.6
    node.compute(2.0)
    assert node.planned < 1.3


@given(DECODE_S, st.floats(1.2, 2.0), st.floats(0.0, 30.0))
def test_a_neighbour_is_planned_for_within_two_seconds_and_while_it_may_come_back(
    predicted_s: float, slowdown: float, before_s: float
) -> None:
    node = Node(predicted_s=predicted_s)
    node.compute(before_s)
    node.compute(2.0, slowdown)
    assert node.planned > 1 + (slowdown - 1) * 0.8
    node.compute(3.0, slowdown)
    assert node.planned == pytest.approx(slowdown, rel=0.02)
    node.compute(WINDOW_S - 4.0)
    assert node.planned > 1 + (slowdown - 1) * 0.8
    node.compute(5.0)
    assert node.planned == pytest.approx(1.0, abs=0.02)


def test_long_iterations_beside_a_neighbour_are_no_stalls() -> None:
    """The first one might be, the second shows that it is not."""
    node = Node(predicted_s=0.5)
    node.compute(5.0)
    node.iterate(3.0)
    assert node.stalls.count == 1
    assert node.planned == pytest.approx(1.0)
    node.iterate(3.0)
    assert node.stalls == Stalls()
    assert node.planned > 2.5
    node.compute(6.0, 3.0)
    assert node.factor == pytest.approx(3.0, rel=0.02)
    assert node.planned == pytest.approx(3.0, rel=0.02)
    assert node.stalls == Stalls()


def test_stalls_that_come_again_cost_the_time_that_they_take() -> None:
    """A second of four is lost: what is planned takes a third longer, not a hundred times."""
    node = Node()
    for _ in range(8):
        node.compute(3.0)
        node.stall()
    node.compute(1.0)
    assert node.stalls.count == 8
    assert node.factor == pytest.approx(1.0, abs=0.05)
    assert 1.2 < node.planned < 1.5
    node.compute(WINDOW_S)
    assert node.planned == pytest.approx(1.0, abs=0.01)


def test_iterations_of_which_every_fifth_is_far_off_are_planned_for_within_two_seconds() -> None:
    """None of them follows another; on the whole they take three times as long."""
    node = Node(predicted_s=0.02)
    node.compute(WINDOW_S)
    until_s = node.now_s + 2.0
    while node.now_s < until_s:
        node.compute(0.08)
        node.iterate(1.0, 0.2)
    node.iterate(1.0)
    assert node.factor > 1.4
    assert node.planned > 1.4


def test_the_last_and_the_longest_stall_are_remembered() -> None:
    node = Node()
    assert node.stalls == Stalls()
    for lost_s in (0.5, 2.0, 0.3):
        node.stall(lost_s)
        node.compute(1.0)
    assert node.stalls.count == 3
    assert node.stalls.longest_s == pytest.approx(2.0)
    assert node.stalls.ago_s == pytest.approx(1.0, abs=0.02)


def test_what_is_lost_in_tens_of_milliseconds_is_no_stall() -> None:
    node = Node()
    node.compute(2.0)
    node.stall(STALL_S_LEAST * 0.9)
    node.compute(0.1)
    assert node.stalls == Stalls()
    assert 1.0 < node.factor < 1.2


@given(st.floats(STALL_S_LEAST * 2, 1.0))
def test_half_of_the_machine_is_no_stall(predicted_s: float) -> None:
    """A neighbour may take as much, and iterations then take as long from the first on."""
    node = Node(predicted_s=predicted_s)
    node.iterate(STALL_RATIO * 0.99)
    assert node.stalls == Stalls()
    assert node.factor > 1.3


def test_a_node_at_rest_is_planned_with_as_its_profile_says() -> None:
    node = Node()
    node.compute(5.0, 3.0)
    node.now_s += WINDOW_S - 1.0
    assert 1.0 < node.factor < 2.0
    assert node.planned > 2.8, "the neighbour may be there yet"
    node.now_s += 60.0
    assert node.planned == node.factor == pytest.approx(1.0, abs=0.01)


def test_a_stall_after_a_rest_is_known_by_what_is_expected_after_it() -> None:
    """Beside the neighbour that has gone since, it would have been no longer than any."""
    node = Node(predicted_s=0.5)
    node.compute(10.0, 3.0)
    node.now_s += 60.0
    node.stall()
    assert node.stalls.count == 1
    assert node.factor == node.planned == pytest.approx(1.0, abs=0.01)


def test_the_first_iterations_of_an_estimate_are_no_stalls() -> None:
    node = Node(guessed=True)
    node.iterate(1.0, 0.5)
    for _ in range(TRIAL_ITERATIONS - 1):
        node.iterate(4.0)
    assert node.correction.trial_left == 0
    assert node.stalls == Stalls()
    node.compute(4.0, 4.0)
    assert node.planned == pytest.approx(4.0, rel=0.06)
    node.stall()
    assert node.planned == pytest.approx(4.0, rel=0.06)
    assert node.stalls.count == 1


ITERATIONS = st.lists(
    st.tuples(st.floats(0.0, 1e3), st.floats(0.0, 10.0), st.floats(0.0, 100.0)), max_size=100
)


@given(st.booleans(), ITERATIONS)
def test_whatever_is_measured_the_books_are_small_and_the_factors_bounded(
    guessed: bool, iterations: list[tuple[float, float, float]]
) -> None:
    correction, now_s, count = LearnedCorrection(guessed=guessed), 0.0, 0
    for measured_s, predicted_s, idle_s in iterations:
        now_s += measured_s + idle_s
        correction.observe(measured_s, predicted_s, now_s)
        factor, planned = correction.factor(now_s), correction.planned(now_s)
        assert RATIO_MIN - 1e-9 <= factor <= planned <= RATIO_MAX + 1e-9
        stalls = correction.stalls(now_s)
        assert stalls.count >= count - 1, "one at a time is taken back"
        assert 0 <= stalls.ago_s <= now_s
        count = stalls.count


def stretched(grid: Grid, factor: float) -> Grid:
    return replace(grid, seconds=tuple(tuple(s * factor for s in row) for row in grid.seconds))


def times(decodes: float = 1.0, prefills: float = 1.0) -> Times:
    return Times(
        replace(PROFILE, decode=stretched(DECODE, decodes), prefill=stretched(PREFILL, prefills))
    )


class Predicted:
    """Iterations of two shapes, predicted by a table that is then refined."""

    def __init__(self) -> None:
        self.correction = LearnedCorrection()
        self.times = times()
        self.now_s = 100.0

    def iterate(self, shape: IterationShape, measured_s: float) -> None:
        self.now_s += measured_s
        self.correction.observe(measured_s, self.times.iteration_s(shape), self.now_s, shape)

    def refine(self, becomes: Times) -> None:
        self.correction.refined(self.times, becomes)
        self.times = becomes

    def predicted_s(self, shape: IterationShape) -> tuple[float, float]:
        """By what is, and by what promises rest on."""
        alone_s = self.times.iteration_s(shape)
        correction, now_s = self.correction, self.now_s
        return alone_s * correction.factor(now_s), alone_s * correction.planned(now_s)


@given(st.floats(0.6, 1.6), st.lists(st.floats(0.8, 1.8), min_size=1, max_size=6))
def test_what_a_profile_takes_up_leaves_the_factors(taken_up: float, spells: list[float]) -> None:
    """Predictions stay where they were, now and as the spells leave the window."""
    told, untold, shape = Predicted(), Predicted(), decode(4, 32)
    for node in (told, untold):
        for slowdown in spells:
            for _ in range(200):
                node.iterate(shape, 0.013 * slowdown)
    told.refine(times(decodes=taken_up))
    assert told.predicted_s(shape) == pytest.approx(untold.predicted_s(shape))
    for _ in range(60):
        for node in (told, untold):
            for _ in range(20):
                node.iterate(shape, 0.013 * spells[-1])
        assert told.predicted_s(shape) == pytest.approx(untold.predicted_s(shape), rel=0.02)


def test_what_is_right_in_the_profile_stays_so_when_the_rest_is_refined() -> None:
    """Prompts take what they should, the decodes among them a third less; once the table says so,
    nothing is left to correct of either, nor to plan for.
    """
    node = Predicted()
    for _ in range(30):
        for shape, count, measured_s in ((prefill(256, 0), 4, 0.15), (decode(4, 32), 60, 0.01)):
            for _ in range(count):
                node.iterate(shape, measured_s)
    assert node.correction.planned(node.now_s) > 0.9
    node.refine(times(decodes=0.010 / 0.013))
    assert node.correction.factor(node.now_s) == pytest.approx(1.0, abs=0.03)
    assert node.correction.planned(node.now_s) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("repeated", [False, True])
def test_an_iteration_held_amid_a_refinement_counts_by_the_new_profile(repeated: bool) -> None:
    """A stall of a second, or the first of two iterations that are four times as slow."""
    told, untold, shape = Predicted(), Predicted(), prefill(256, 0)
    for node in (told, untold):
        for _ in range(100):
            node.iterate(shape, 0.15)
        node.iterate(shape, 0.6 if repeated else 1.15)
    told.refine(times(prefills=1.2))
    for node in (told, untold):
        node.iterate(shape, 0.6 if repeated else 0.15)
    assert told.predicted_s(shape) == pytest.approx(untold.predicted_s(shape), rel=0.08)
    assert (told.correction.factor(told.now_s) > 1.2) is repeated


def test_a_window_holds_few_slots_however_short_iterations_are() -> None:
    node = Node(predicted_s=0.0005)
    node.compute(WINDOW_S * 1.5)
    assert len(node.correction._slots) <= WINDOW_S / SLOT_S + 2
