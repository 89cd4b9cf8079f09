"""Surveys: the order of what is measured, and how well the tables know the machine."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.learned_correction import LearnedCorrection
from mesh.compute.refining import SHIFT_MAX, Refinement, taken_up
from mesh.compute.survey import REPEATS_MAX, REPEATS_MIN, Survey, undisturbed_s
from mesh.compute.times import Times
from mesh.domain.errors import EngineError
from mesh.domain.ids import ModelId
from mesh.domain.profile import Grid, IterationShape, Profile
from mesh.domain.reasons import DeviceKind
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


def test_an_instance_that_never_decodes_is_asked_for_no_decode_and_no_past() -> None:
    survey = Survey(
        context_tokens_max=512,
        batch_max=8,
        kv_tokens=4096,
        prefill_tokens_max=512,
        decodes=False,
        pasts=False,
    )
    asked = run(survey, machine_s)
    assert {(one.decode_batch, one.prefill_past_tokens) for one in asked} == {(0, 0)}
    prefill, decode = survey.grids()
    assert prefill.rows[-1] == 512
    assert decode.at(1, 100) == prefill.at(1, 0)


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
def test_a_table_that_is_too_slow_is_mended_though_the_factor_explains_it(too_slow: float) -> None:
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
def test_one_iteration_moves_a_point_by_its_part(measured_s: float, factor: float) -> None:
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
