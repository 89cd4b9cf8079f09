"""What the profile benchmark draws, and how it reads iterations."""

import random
from statistics import median

import pytest

from bench.profile_measuring import (
    BATCH_MAX,
    PROMPT_TOKENS_MAX,
    Iteration,
    Predictions,
    as_one,
    prompts,
    right_after_s,
    sweeps,
)
from mesh.compute.times import Times
from mesh.domain.profile import IterationShape
from mesh.domain.steps import StepResult
from tests.core.cells import step_result
from tests.support.profiles import PROFILE


def iteration(measured_s: float, predicted_s: float, at_s: float = 0.0) -> Iteration:
    return Iteration(
        at_s=at_s,
        measured_s=measured_s,
        predicted_s=predicted_s,
        refined_s=predicted_s,
        corrected_s=predicted_s,
    )


def decode(batch: int, context_tokens: int, elapsed_s: float) -> StepResult:
    return step_result(
        decode_batch=batch,
        context_tokens=batch * context_tokens,
        kv_blocks_used=0,
        elapsed_s=elapsed_s,
    )


def test_a_workload_deviates_by_the_sum_of_its_iterations() -> None:
    both = as_one([iteration(0.1, 0.15), iteration(0.3, 0.25)])
    assert both.deviation == pytest.approx(0.0)


def test_a_stall_does_not_count_in_a_typical_iteration() -> None:
    found = as_one([iteration(0.1, 0.11), iteration(0.1, 0.11), iteration(2.0, 0.11)], median)
    assert found.deviation == pytest.approx(0.1)


def test_an_iteration_is_predicted_before_it_is_learned_from() -> None:
    predictions = Predictions(PROFILE)
    predicted_s = Times(PROFILE).iteration_s(
        IterationShape(decode_batch=4, decode_context_tokens=100)
    )
    first = predictions.note(decode(4, 100, 2 * predicted_s), 1.0)
    assert first.predicted_s == first.corrected_s == pytest.approx(predicted_s)
    second = predictions.note(decode(4, 100, 2 * predicted_s), 1.0 + 2 * predicted_s)
    assert second.predicted_s == pytest.approx(predicted_s)
    assert predicted_s < second.corrected_s < 2 * predicted_s


def test_predictions_are_right_again_when_a_second_of_them_is_near() -> None:
    wrong = [iteration(0.1, 0.05, at_s=0.1 * i) for i in range(30)]
    right = [iteration(0.1, 0.09, at_s=3.0 + 0.1 * i) for i in range(30)]
    found = right_after_s([*wrong, *right], 1.0)
    assert found is not None
    # In the second after that, the majority is right.
    assert 1.0 < found <= 2.0


def test_predictions_that_stay_wrong_are_never_right_again() -> None:
    assert right_after_s([iteration(0.1, 0.05, at_s=0.1 * i) for i in range(90)], 1.0) is None


def test_prompts_cover_the_range_as_often_short_as_long() -> None:
    lengths = sorted(prompts(random.Random(1), 1000))
    assert lengths[0] == 1
    assert PROMPT_TOKENS_MAX * 0.9 < lengths[-1] <= PROMPT_TOKENS_MAX
    assert 30 < lengths[500] < 60, "the median of a log-uniform draw is the root of its end"


def test_sweeps_hold_all_batches_descending_with_a_request_for_each() -> None:
    drawn = sweeps(random.Random(1), 100, 6)
    assert sum(len(sweep.batches) for sweep in drawn) == 100
    for sweep in drawn:
        assert list(sweep.batches) == sorted(sweep.batches, reverse=True)
        assert sweep.batches[-1] >= 1
        assert sweep.batches[0] == len(sweep.context_tokens) <= BATCH_MAX
