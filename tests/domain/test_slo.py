"""Deadlines and headroom."""

from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.slo import PACE, Slo, next_due_s


def test_long_prompts_have_longer_to_their_first_token() -> None:
    slo = Slo(ttft_s=2.0, ttft_tokens_per_s=512.0)
    assert slo.ttft_limit_s(100) == 2.0
    assert slo.ttft_limit_s(2048) == 4.0


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
