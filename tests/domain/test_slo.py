"""Deadlines and headroom."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.slo import Slo, headroom_s


def test_long_prompts_have_longer_to_their_first_token() -> None:
    slo = Slo(ttft_s=2.0, ttft_tokens_per_s=512.0)
    assert slo.ttft_limit_s(100) == 2.0
    assert slo.ttft_limit_s(2048) == 4.0


@given(start_s=st.floats(0, 1e6), waited_s=st.floats(0, 100), tokens=st.integers(0, 1000))
def test_headroom_is_the_time_to_the_next_tokens_deadline(
    start_s: float, waited_s: float, tokens: int
) -> None:
    """The n-th token is due at start + TTFT + n * TPOT; eq. 1 counts down to that."""
    due_s = start_s + 2.0 + tokens * 0.25
    got = headroom_s(
        start_s=start_s,
        ttft_limit_s=2.0,
        tpot_s=0.25,
        output_tokens=tokens,
        now_s=start_s + waited_s,
    )
    assert abs(got - (due_s - (start_s + waited_s))) < 1e-6
