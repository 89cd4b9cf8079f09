"""Deadlines and headroom."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.slo import Slo, due_s, next_due_s


def test_long_prompts_have_longer_to_their_first_token() -> None:
    slo = Slo(ttft_s=2.0, ttft_tokens_per_s=512.0)
    assert slo.ttft_limit_s(100) == 2.0
    assert slo.ttft_limit_s(2048) == 4.0


@given(start_s=st.floats(0, 1e6), waited_s=st.floats(0, 100), tokens=st.integers(0, 1000))
def test_headroom_is_the_time_to_the_next_tokens_deadline(
    start_s: float, waited_s: float, tokens: int
) -> None:
    """Eq. 1 is what is left of the time until start + TTFT + n * TPOT."""
    now_s = start_s + waited_s
    headroom_s = 2.0 + 0.25 * tokens - waited_s
    got = due_s(start_s=start_s, ttft_limit_s=2.0, tpot_s=0.25, output_tokens=tokens)
    assert abs((got - now_s) - headroom_s) < 1e-6


def test_a_token_in_time_leaves_the_pace_as_it_is() -> None:
    assert next_due_s(10.0, 0.25, 9.0) == 10.25


def test_a_late_token_is_forgiven() -> None:
    """The next one is due a TPOT after it came, not after it should have come."""
    assert next_due_s(10.0, 0.25, 12.0) == 12.25
