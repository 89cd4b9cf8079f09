"""The mean output length: the prior, the plain mean of few answers, and how old ones fade."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.history import PRIOR_COUNT, PRIOR_TOKENS, WINDOW, OutputHistory


def after(*answers: int) -> OutputHistory:
    history = OutputHistory()
    for output_tokens in answers:
        history = history.after(output_tokens)
    return history


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
