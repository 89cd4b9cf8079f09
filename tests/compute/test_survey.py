"""Surveys: the order of what is measured, and how well the tables know the machine."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from mesh.compute.survey import REPEATS_MAX, REPEATS_MIN, Survey, undisturbed_s
from mesh.domain.errors import EngineError
from mesh.domain.profile import Grid, IterationShape
from tests.compute.models import Cost, demo_survey, machine_s, noisy, run

FLAT_S = 0.01


def errors(cost: Cost, prefill: Grid, decode: Grid, random: Random) -> list[float]:
    """Relative deviations at random shapes that the demo model's instance can compute."""
    found: list[float] = []
    while len(found) < 1000:
        tokens = random.randint(1, 256)
        past = random.randint(0, 2048 - tokens)
        shape = IterationShape(prefill_tokens=tokens, prefill_past_tokens=past)
        found.append(prefill.at(tokens, past) / cost(shape) - 1)
        batch, context = random.randint(1, 32), random.randint(32, 2048)
        if batch * -(-context // 32) * 32 <= 16384:
            shape = IterationShape(decode_batch=batch, decode_context_tokens=context)
            found.append(decode.at(batch, context) / cost(shape) - 1)
    return found


def test_a_quiet_machine_is_known_to_one_percent() -> None:
    survey = demo_survey()
    run(survey, machine_s)
    deviations = [abs(e) for e in errors(machine_s, *survey.grids(), Random(1))]
    assert max(deviations) < 0.01


@pytest.mark.parametrize("seed", range(8))
def test_a_noisy_machine_is_known_to_three_percent(seed: int) -> None:
    """5 % of noise and stalls: 3 % in the mean, nowhere far off, and not one-sided."""
    survey = demo_survey()
    run(survey, noisy(machine_s, Random(seed)))
    found = errors(machine_s, *survey.grids(), Random(seed + 100))
    assert sum(map(abs, found)) / len(found) < 0.03
    assert max(map(abs, found)) < 0.12
    assert abs(sum(found) / len(found)) < 0.02


def test_a_noisy_second_spoils_no_shape() -> None:
    """For two seconds, everything takes five times as long."""
    survey = demo_survey()

    def disturbed_s(shape: IterationShape) -> float:
        return machine_s(shape) * (5 if 12 < survey.measured_s < 14 else 1)

    run(survey, disturbed_s)
    assert max(map(abs, errors(machine_s, *survey.grids(), Random(1)))) < 0.01


@pytest.mark.parametrize("seed", range(6))
def test_neighbours_that_take_turns_leave_no_trace(seed: int) -> None:
    """They come for seconds and go for seconds, and make everything take 1.4 times as long. A shape
    that has met them each time would be off by 40 %.
    """
    survey, random = demo_survey(), Random(seed)
    slow, until_s = False, 0.0
    quiet_s = noisy(machine_s, random, spread=0.02, stalls=0.0)

    def disturbed_s(shape: IterationShape) -> float:
        nonlocal slow, until_s
        while survey.measured_s >= until_s:
            slow, until_s = not slow, until_s + random.expovariate(1 / 4.0)
        return quiet_s(shape) * (1.4 if slow else 1.0)

    run(survey, disturbed_s)
    found = list(map(abs, errors(machine_s, *survey.grids(), Random(seed + 100))))
    assert sum(found) / len(found) < 0.025
    assert max(found) < 0.1
    assert survey.measured_s < 60


def test_the_first_time_of_a_shape_does_not_count() -> None:
    survey = demo_survey()
    seen: set[IterationShape] = set()

    def cold_s(shape: IterationShape) -> float:
        cold = shape not in seen
        seen.add(shape)
        return machine_s(shape) + (1.0 if cold else 0.0)

    run(survey, cold_s)
    assert max(map(abs, errors(machine_s, *survey.grids(), Random(1)))) < 0.01


def test_each_shape_is_visited_once_a_round() -> None:
    """Decodes are computed twice a visit, but for the first."""
    asked = run(demo_survey(), machine_s)
    shapes = len(set(asked))
    first = asked[:shapes]
    second = [shape for shape in first for _ in range(2 if shape.decode_batch else 1)]
    assert len(set(first)) == shapes
    assert asked[shapes : shapes + len(second)] == second


def test_a_decode_counts_that_follows_its_like_and_a_prefill_that_does_not() -> None:
    """Whenever the shape changes, an iteration takes 4 ms more."""
    survey = demo_survey()
    before: list[IterationShape] = []

    def changing_s(shape: IterationShape) -> float:
        changed = before[-1:] != [shape]
        before.append(shape)
        return machine_s(shape) + (4e-3 if changed else 0.0)

    run(survey, changing_s)
    prefill, decode = survey.grids()
    one = IterationShape(decode_batch=1, decode_context_tokens=128)
    chunk = IterationShape(prefill_tokens=64)
    assert decode.at(1, 128) == pytest.approx(machine_s(one))
    assert prefill.at(64, 0) == pytest.approx(machine_s(chunk) + 4e-3)


def test_short_shapes_are_repeated_more_often_and_always_an_odd_number_of_times() -> None:
    counts = Counter(run(demo_survey(), machine_s))
    repeats = {
        shape: (count - 1) // (2 if shape.decode_batch else 1) for shape, count in counts.items()
    }
    assert all(count % 2 == 1 and count >= REPEATS_MIN for count in repeats.values())
    longest = max(repeats, key=machine_s)
    shortest = min(repeats, key=machine_s)
    assert repeats[longest] == REPEATS_MIN
    assert repeats[shortest] == REPEATS_MAX


@pytest.mark.parametrize(
    ("times_s", "expected_s"),
    [
        ([1.5, 1.0, 1.52, 1.02, 1.51, 1.04, 1.5], 1.02),
        ([1.0, 1.05, 1.1], 1.05),
        ([0.5, 1.0, 1.01, 1.02, 1.6], 1.01),
        ([1.0, 2.0, 4.0], 2.0),
    ],
    ids=["slow half of the time", "small noise", "one too short", "none agree"],
)
def test_the_shortest_times_that_agree_count(times_s: list[float], expected_s: float) -> None:
    assert undisturbed_s(times_s) == expected_s


def test_no_two_chunks_of_one_length_follow_each_other() -> None:
    asked = run(demo_survey(), machine_s)
    lengths = [shape.prefill_tokens for shape in asked[: len(set(asked))] if shape.prefill_tokens]
    assert all(before != after for before, after in pairwise(lengths))


def test_two_stalls_among_three_times_are_found_out() -> None:
    """Three times that do not agree are not enough, however long they took."""
    survey = Survey(context_tokens_max=1, batch_max=1, kv_tokens=32, prefill_tokens_max=1)
    times = {"prefill": iter([1.0, 3.0, 3.1, *[1.0] * 9]), "decode": iter([1.0] * 9)}
    run(survey, lambda shape: next(times["decode" if shape.decode_batch else "prefill"]))
    prefill, decode = survey.grids()
    assert prefill.at(1, 0) == decode.at(1, 1) == 1.0


def test_the_survey_of_the_demo_model_takes_less_than_a_minute() -> None:
    survey = demo_survey()
    asked = run(survey, machine_s)
    assert survey.measured_s == pytest.approx(sum(map(machine_s, asked)))
    assert survey.measured_s < 50


def test_a_shape_stays_the_next_one_until_it_is_noted() -> None:
    survey = demo_survey()
    first = survey.next_shape()
    assert first == survey.next_shape()
    survey.note(FLAT_S)
    assert survey.next_shape() not in (first, None)


def test_the_share_never_falls_and_ends_at_one() -> None:
    survey = demo_survey()
    shares, phases = [survey.share], [survey.phase]
    measured_s = noisy(machine_s, Random(1))
    while (shape := survey.next_shape()) is not None:
        survey.note(measured_s(shape))
        shares.append(survey.share)
        phases.append(survey.phase)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert all(before <= after for before, after in pairwise(shares))
    assert max(after - before for before, after in pairwise(shares)) < 0.05
    assert list(dict.fromkeys(phases)) == ["warm up", "measure prefill and decode"]


def test_skipped_shapes_are_asked_for_once_and_their_cells_are_filled() -> None:
    """Batches of 8 or more beyond 256 tokens cannot be computed: the cache is in use otherwise."""
    survey = demo_survey()
    skipped = Counter[IterationShape]()
    while (shape := survey.next_shape()) is not None:
        if shape.decode_batch >= 8 and shape.decode_context_tokens > 256:
            skipped[shape] += 1
            survey.skip()
        else:
            survey.note(machine_s(shape))
    assert skipped
    assert set(skipped.values()) == {1}
    assert survey.share == 1.0
    assert max(map(abs, errors(machine_s, *survey.grids(), Random(1)))) < 0.01


def test_a_shape_that_is_skipped_late_keeps_its_times() -> None:
    survey = Survey(context_tokens_max=1, batch_max=1, kv_tokens=32, prefill_tokens_max=1)
    for _ in range(2):
        survey.note(FLAT_S)
    for _ in range(REPEATS_MIN):
        for _ in range(3):
            survey.note(FLAT_S)
    survey.skip()
    survey.skip()
    assert survey.next_shape() is None
    assert survey.grids()[1].seconds == ((FLAT_S,),)


@pytest.mark.parametrize(("broken", "word"), [(True, "decode"), (False, "prefill")])
def test_without_any_time_of_a_kind_there_are_no_tables(broken: bool, word: str) -> None:
    survey = demo_survey()
    while (shape := survey.next_shape()) is not None:
        if bool(shape.decode_batch) is broken:
            survey.skip()
        else:
            survey.note(FLAT_S)
    with pytest.raises(EngineError, match=f"no {word} iteration"):
        survey.grids()


def test_a_survey_that_has_hardly_begun_makes_no_tables() -> None:
    survey = demo_survey()
    survey.note(FLAT_S)
    with pytest.raises(EngineError):
        survey.grids()


def test_an_instance_without_room_for_anything_ends_without_tables() -> None:
    survey = Survey(context_tokens_max=64, batch_max=4, kv_tokens=0, prefill_tokens_max=64)
    while survey.next_shape() is not None:
        survey.skip()
    with pytest.raises(EngineError):
        survey.grids()
