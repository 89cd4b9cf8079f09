"""Deadlines, headroom, outcomes and the mean output length."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.deployment import DeploymentSpec, class_order
from mesh.domain.history import BINS_MAX, PRIOR_COUNT, PRIOR_TOKENS, WINDOW, CallGaps, OutputHistory
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import PACE, Slo, best_effort, next_due_s
from mesh.evaluation.summary import summarize


def test_long_prompts_have_longer_to_their_first_token() -> None:
    slo = Slo(ttft_s=2.0, ttft_tokens_per_s=512.0)
    assert slo.ttft_limit_s(100) == 2.0
    assert slo.ttft_limit_s(2048) == 4.0


def test_classes_come_as_manifests_list_them_and_best_effort_last() -> None:
    slow, quick, batch = Slo(name="slow"), Slo(name="quick"), best_effort("batch", 60.0)
    names = ("gone", "batch", "quick", "slow", "other")
    specs = [
        DeploymentSpec(name=DeploymentName(name), source="pkg://a/b", classes=classes)
        for name, classes in (("b", (quick, Slo(name="other"))), ("a", (slow, batch, quick)))
    ]
    assert class_order(names, specs) == ["slow", "quick", "other", "batch", "gone"]
    assert class_order(names, ()) == sorted(names)


@given(
    early_s=st.floats(0, 10),
    tokens=st.integers(2, 400),
    expected=st.integers(1, 1000),
    lags=st.lists(st.floats(0, 1), min_size=1, max_size=50),
)
def test_who_keeps_the_pace_keeps_the_slo_by_both_measures(
    early_s: float, tokens: int, expected: int, lags: list[float]
) -> None:
    """Every token comes at its deadline at the latest; the answer is as long as was counted on, or
    longer.
    """
    slo = Slo(ttft_s=10.0, tpot_s=0.25)
    tokens = max(tokens, int(expected * PACE.slack_share) + 1)
    first_s, pace_s = 10.0 - early_s, PACE.token_s(slo)
    due_s = next_due_s(10.0, pace_s, first_s, slack_s=PACE.slack_s(slo, expected))
    came_s = first_s
    for n, lag in zip(range(1, tokens), cycle(lags)):
        came_s = max(came_s, due_s - lag)
        assert came_s <= 10.0 + n * slo.tpot_s + 1e-9
        due_s = next_due_s(due_s, pace_s, came_s)
    assert (came_s - first_s) / (tokens - 1) <= slo.tpot_s + 1e-9


def test_a_token_in_time_leaves_the_pace_as_it_is() -> None:
    assert next_due_s(10.0, 0.25, 9.0) == 10.25


def test_a_late_token_is_forgiven() -> None:
    """The next one is due a TPOT after it came, not after it should have come."""
    assert next_due_s(10.0, 0.25, 12.0) == 12.25


GOOD = Outcome(
    request_id=RequestId("r"),
    deployment=DeploymentName("chat"),
    slo=Slo(ttft_s=1.0, ttft_tokens_per_s=512, tpot_s=0.1),
    arrival_s=10.0,
    input_tokens=100,
    tokens_s=(11.0, 11.1, 11.2),
    ended_s=11.2,
    end=FinishReason.LENGTH,
)


def test_tokens_at_their_deadlines_are_in_time() -> None:
    assert GOOD.late_s == pytest.approx(0.0)
    early = replace(GOOD, tokens_s=(10.9, 11.0, 11.1))
    assert (early.met, early.met_without_grace, early.met_in_the_mean) == (True, True, True)
    assert early.ttft_s == pytest.approx(0.9)
    assert early.tpot_s == pytest.approx(0.1)


def test_one_late_token_breaks_the_slo_but_not_the_mean() -> None:
    late = replace(GOOD, tokens_s=(10.9, 11.35, 11.05), slo=replace(GOOD.slo, tpot_s=0.2))
    assert not late.met
    assert late.met_in_the_mean


def test_what_only_a_load_made_late_is_judged_by_what_it_was_told_and_by_its_slo() -> None:
    cold = replace(GOOD, tokens_s=(12.0, 12.1), accepted=True, grace_s=1.5)
    assert (cold.met, cold.met_in_the_mean) == (True, True)
    assert (cold.met_without_grace, cold.met_in_the_mean_without_grace) == (False, False)
    assert not cold.promised_in_time
    assert cold.late_over_told == pytest.approx(1.0 / 1.5)
    assert replace(cold, tokens_s=(13.0, 13.1)).late_over_told == pytest.approx(2.0 / 1.5)
    assert replace(cold, tokens_s=(10.5, 10.6)).late_over_told == pytest.approx(-0.5 / 1.5)


def test_nothing_is_late_over_what_was_not_told_or_never_came() -> None:
    assert GOOD.late_over_told is None
    assert replace(GOOD, tokens_s=(), accepted=True, grace_s=1.5).late_over_told is None


@pytest.mark.parametrize(
    ("accepted", "tokens_s", "end", "admitted"),
    [
        (True, (), RefusalReason.NODE_LOST, True),
        (False, (11.0,), RefusalReason.NODE_LOST, True),
        (False, (), RefusalReason.QUEUE_FULL, False),
        (False, (), FinishReason.FAILED, True),
    ],
)
def test_who_was_refused_before_it_had_a_place_was_promised_nothing(
    accepted: bool, tokens_s: tuple[float, ...], end: FinishReason | RefusalReason, admitted: bool
) -> None:
    made = replace(GOOD, accepted=accepted, tokens_s=tokens_s, end=end)
    assert (made.admitted, made.promised_in_time) == (admitted, admitted)


def test_a_request_that_did_not_finish_met_nothing() -> None:
    cut = replace(GOOD, tokens_s=(10.5,), end=RefusalReason.NODE_LOST)
    assert [cut.met, cut.met_in_the_mean, cut.finished] == [False] * 3


def test_a_summary_counts_each_once() -> None:
    refused = replace(GOOD, tokens_s=(), end=RefusalReason.FIRST_TOKEN_LATE)
    early = replace(GOOD, tokens_s=(10.5, 10.6, 10.7))
    made = summarize([early, early, refused])
    assert (made.requests, made.finished, made.met, made.output_tokens) == (3, 2, 2, 6)
    assert made.refused == (("first_token_late", 1),)
    assert made.ttft_s_p50 == pytest.approx(0.5)
    assert summarize([]).ttft_s_p95 is None
    # TTFT is 1 s and TPOT 0.1 s: the second token is late, and what is cut off counts nothing.
    late = replace(GOOD, tokens_s=(10.5, 12.0))
    cut = replace(GOOD, tokens_s=(10.5,), end=RefusalReason.NODE_LOST)
    shares = summarize([early, late, cut, refused])
    assert (shares.ttft_met, shares.tokens_in_time_share) == (3, 1.5 / 4)


def after(*answers: int) -> OutputHistory:
    history = OutputHistory()
    for output_tokens in answers:
        history = history.after(output_tokens)
    return history


def gaps_after(gaps_s: Iterable[float]) -> CallGaps:
    gaps = CallGaps()
    for gap_s in gaps_s:
        gaps = gaps.after(gap_s)
    return gaps


def test_calls_are_expected_by_the_times_between_them_and_else_by_their_rate() -> None:
    by_rate = CallGaps().chance(10.0, 60.0, calls_per_s=0.01)
    assert by_rate == pytest.approx(1.0 - exp(-0.6))
    gaps = gaps_after([30.0] * 50 + [3e5, 0.0])
    assert gaps.chance(10.0, 60.0, calls_per_s=1e-4) > 0.8
    assert gaps.chance(100.0, 60.0, calls_per_s=1e-4) < 0.05, "it has missed its time"
    assert len(gaps.ended) == len(gaps.reached) == BINS_MAX


def test_a_burst_does_not_make_a_deployment_forget_how_long_its_pauses_are() -> None:
    gaps = gaps_after(([3600.0] + [0.5] * 200) * 3)
    assert gaps.chance(3500.0, 600.0, calls_per_s=0.0) > 0.5
    assert gaps.chance(10.0, 60.0, calls_per_s=0.0) < 0.05, "a pause has begun"


def test_the_pauses_between_bursts_do_not_hide_that_the_next_call_of_a_burst_comes_soon() -> None:
    """A thousand calls a second apart, then an hour without: 0.999 of all come within a minute."""
    gaps = gaps_after(([3600.0] + [1.0] * 1000) * 5)
    assert gaps.chance(0.0, 60.0, calls_per_s=1.0) > 0.99


@pytest.mark.parametrize(("mean_s", "least", "most"), [(30.0, 0.80, 0.92), (600.0, 0.04, 0.16)])
def test_calls_at_random_are_as_likely_as_their_rate_says(
    mean_s: float, least: float, most: float
) -> None:
    """Within a minute 0.865 and 0.095, however long none has come."""
    shares = ((number * 0.6180339887498949) % 1.0 for number in range(1, 2001))
    gaps = gaps_after(-mean_s * log(1.0 - share) for share in shares)
    for idle_s in (0.0, mean_s / 3, mean_s):
        assert least < gaps.chance(idle_s, 60.0, calls_per_s=1.0 / mean_s) < most


def test_what_is_long_ago_fades_with_the_time_too() -> None:
    """Nights without a call, and then ten weeks of calls within an hour of each other."""
    nights = [36_000.0] * 20
    assert gaps_after(nights).chance(35_000.0, 7200.0, calls_per_s=0.0) > 0.8
    later = gaps_after(nights + [3000.0] * 2000)
    assert later.chance(35_000.0, 7200.0, calls_per_s=0.0) < 0.1


@given(st.lists(st.floats(0.0, 1e6), max_size=20), st.floats(0.0, 1e6), st.floats(0.1, 1e4))
def test_a_chance_is_a_probability_that_grows_with_the_time(
    gaps_s: list[float], idle_s: float, within_s: float
) -> None:
    gaps = gaps_after(gaps_s)
    chance = gaps.chance(idle_s, within_s, 0.5)
    assert 0.0 <= chance < 1.0
    assert chance <= gaps.chance(idle_s, 2 * within_s, 0.5) + 1e-9


def test_before_the_first_answer_the_prior_is_expected() -> None:
    assert OutputHistory().mean_tokens == PRIOR_TOKENS


def test_the_first_answers_weigh_against_the_prior_by_their_number() -> None:
    assert after(28).mean_tokens == pytest.approx((4 * 128 + 28) / 5)
    assert after(28, 28, 28, 28).mean_tokens == pytest.approx((128 + 28) / 2)


@given(st.lists(st.integers(0, 5000), max_size=WINDOW - PRIOR_COUNT))
def test_up_to_the_window_it_is_the_plain_mean_with_the_prior(answers: list[int]) -> None:
    """And so the order of the answers makes no difference."""
    expected = (PRIOR_COUNT * PRIOR_TOKENS + sum(answers)) / (PRIOR_COUNT + len(answers))
    assert after(*answers).mean_tokens == pytest.approx(expected)
    assert after(*reversed(answers)).mean_tokens == pytest.approx(expected)


def test_beyond_the_window_each_answer_counts_for_its_share_of_it() -> None:
    full = after(*[100] * WINDOW)
    assert full.count == full.after(1).count == WINDOW
    mean_tokens = full.mean_tokens
    assert full.after(356).mean_tokens == pytest.approx(mean_tokens + (356 - mean_tokens) / WINDOW)


def test_what_answers_were_like_before_is_forgotten_within_a_few_windows() -> None:
    changed = after(*[1000] * WINDOW, *[10] * (5 * WINDOW))
    assert 10 < changed.mean_tokens < 20


@given(st.lists(st.integers(0, 5000), max_size=2 * WINDOW))
def test_the_mean_stays_between_the_shortest_and_the_longest(answers: list[int]) -> None:
    mean_tokens = after(*answers).mean_tokens
    assert min([PRIOR_TOKENS, *answers]) - 1e-6 <= mean_tokens
    assert mean_tokens <= max([PRIOR_TOKENS, *answers]) + 1e-6
