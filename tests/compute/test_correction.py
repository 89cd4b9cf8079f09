"""The correction follows what a node really takes, and forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.correction import RATIO_MAX, RATIO_MIN, TRIAL_ITERATIONS, Correction

ITERATION_S = st.floats(0.001, 0.2)


class Node:
    """Computes iterations back to back and tells its correction."""

    def __init__(self) -> None:
        self.correction = Correction()
        self.now_s = 100.0

    def compute(self, compute_s: float, *, predicted_s: float, slowdown: float) -> None:
        """Iterations until `compute_s` have passed."""
        until_s = self.now_s + compute_s
        while self.now_s < until_s:
            self.now_s += predicted_s * slowdown
            self.correction.observe(predicted_s * slowdown, predicted_s, self.now_s)

    @property
    def factor(self) -> float:
        return self.correction.factor(self.now_s)


@given(ITERATION_S)
def test_a_node_three_times_slower_is_known_within_two_seconds(predicted_s: float) -> None:
    """Whatever the length of its iterations: 2 s are two thirds of a second as predicted."""
    node = Node()
    node.compute(2.0, predicted_s=predicted_s, slowdown=3.0)
    assert 2.4 < node.factor <= 3.0
    node.compute(4.0, predicted_s=predicted_s, slowdown=3.0)
    assert node.factor == pytest.approx(3.0, rel=0.02)


@given(ITERATION_S)
def test_a_node_that_is_well_again_is_known_within_two_seconds(predicted_s: float) -> None:
    node = Node()
    node.compute(10.0, predicted_s=predicted_s, slowdown=3.0)
    node.compute(2.0, predicted_s=predicted_s, slowdown=1.0)
    assert node.factor == pytest.approx(1.0, abs=0.06)


def test_promises_are_planned_with_what_the_node_tells_until_it_tells_anew() -> None:
    correction = Correction()
    correction.note_factor(1.1, 1.0, planned=1.5)
    assert correction.planned(1.0) == 1.5
    correction.note_factor(1.0, 2.0)
    assert correction.planned(2.0) == 1.5, "after an iteration"
    correction.note_factor(1.0, 3.0, planned=1.2)
    assert correction.planned(3.0) == 1.2, "in a heartbeat"


@given(st.floats(RATIO_MIN, RATIO_MAX), st.floats(RATIO_MIN, RATIO_MAX), st.floats(0.0, 60.0))
def test_promises_are_planned_with_no_less(factor: float, planned: float, later_s: float) -> None:
    correction = Correction()
    correction.note_factor(factor, 0.0, planned=planned)
    assert correction.planned(later_s) == max(correction.factor(later_s), planned)


def test_a_node_that_turns_out_to_be_quicker_than_its_profile_is_believed_at_once() -> None:
    correction = Correction()
    correction.note_factor(0.5, 1.0)
    assert correction.planned(1.0) == 0.5


def test_what_was_planned_with_while_an_estimate_was_on_trial_is_forgotten() -> None:
    """The engine builds its kernels then."""
    correction = Correction(guessed=True)
    correction.note_factor(8.0, 1.0, planned=8.0)
    for _ in range(TRIAL_ITERATIONS):
        correction.reported(1.0, 2.0)
    assert correction.planned(2.0) == 1.0


@given(
    st.floats(0.0, 100.0),
    st.lists(st.tuples(st.floats(0.0, 1e3), st.floats(0.0, 10.0), st.floats(0.0, 100.0))),
)
def test_the_factor_is_bounded_whatever_is_measured(
    start: float, iterations: list[tuple[float, float, float]]
) -> None:
    correction = Correction(start)
    now_s = 0.0
    for measured_s, predicted_s, idle_s in iterations:
        now_s += measured_s + idle_s
        correction.observe(measured_s, predicted_s, now_s)
        assert RATIO_MIN - 1e-9 <= correction.factor(now_s) <= RATIO_MAX + 1e-9


@given(st.floats(RATIO_MIN, RATIO_MAX), st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_without_iterations_it_fades_to_one(start: float, idle_s: float, longer_s: float) -> None:
    correction = Correction()
    correction.note_factor(start, 100.0)
    soon = abs(correction.factor(100.0 + idle_s) - 1)
    late = abs(correction.factor(100.0 + idle_s + longer_s) - 1)
    assert late <= soon <= abs(start - 1) + 1e-12
    assert correction.factor(100.0) == start
    assert correction.factor(200.0) == pytest.approx(1.0, abs=0.001)


def test_a_node_that_computes_all_the_time_forgets_nothing_meanwhile() -> None:
    """Long iterations are no idle time: the factor of a slow node stays where it is."""
    node = Node()
    node.compute(100.0, predicted_s=5.0, slowdown=3.0)
    assert node.factor == pytest.approx(3.0, rel=1e-3)


def test_an_iteration_without_a_prediction_teaches_nothing() -> None:
    correction = Correction(2.0)
    correction.observe(1.0, 0.0, 0.0)
    assert correction.factor(0.0) == 2.0


def test_the_latest_factor_does_not_fade() -> None:
    correction = Correction(2.0)
    assert correction.factor(1000.0) == pytest.approx(1.0)
    assert correction.latest == 2.0


def test_the_first_iterations_of_an_estimate_count_as_if_there_were_no_past() -> None:
    correction = Correction(guessed=True)
    correction.observe(0.2, 0.1, 100.2)
    assert correction.factor(100.2) == pytest.approx(2.0)
    correction.observe(0.4, 0.1, 100.6)
    assert correction.factor(100.6) == pytest.approx(3.0), "their mean"
    measured = Correction()
    measured.observe(0.2, 0.1, 100.2)
    assert measured.factor(100.2) < 1.25


def test_what_was_learned_of_an_estimate_is_kept_while_the_node_is_idle() -> None:
    correction = Correction(guessed=True)
    correction.observe(0.2, 0.1, 100.2)
    assert correction.factor(1000.0) == pytest.approx(2.0)


@given(ITERATION_S)
def test_an_estimate_is_corrected_on_and_on(predicted_s: float) -> None:
    node = Node()
    node.correction = Correction(guessed=True)
    node.compute(4.0, predicted_s=predicted_s, slowdown=2.0)
    node.compute(4.0, predicted_s=predicted_s, slowdown=1.0)
    assert node.factor == pytest.approx(1.0, abs=0.02)
