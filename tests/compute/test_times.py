"""Predictions of iterations."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.compute.references import REFERENCES
from mesh.compute.times import Times
from mesh.domain.profile import Grid, IterationShape, Profile
from tests.support.profiles import PROFILE, profile

TOKENS = st.integers(1, 4096)
PROFILES = st.sampled_from(REFERENCES)


def test_an_iteration_is_a_decode_and_what_its_prompt_tokens_add() -> None:
    """PROFILE takes 1 ms for one token, 20 ms for 256 and 8 ms for a decode of 32 at 512."""
    times = Times(PROFILE)
    decode = IterationShape(decode_batch=32, decode_context_tokens=512)
    prefill = IterationShape(prefill_tokens=256)
    both = IterationShape(decode_batch=32, decode_context_tokens=512, prefill_tokens=256)
    assert times.iteration_s(decode) == 0.008
    assert times.iteration_s(prefill) == 0.020
    assert times.iteration_s(both) == 0.008 + (0.020 - 0.001)


def test_a_mixed_iteration_is_not_quicker_than_a_prefill_of_all_its_rows() -> None:
    """64 ms for 64 tokens, 80 ms for 128, and decodes that cost little: 64 + 64 rows take 80 ms."""
    prefill = Grid(rows=(1, 64, 128), columns=(0,), seconds=((0.060,), (0.064,), (0.080,)))
    decode = Grid(rows=(1, 64), columns=(1,), seconds=((0.060,), (0.061,)))
    times = Times(profile(prefill=prefill, decode=decode))
    both = IterationShape(decode_batch=64, decode_context_tokens=1, prefill_tokens=64)
    assert times.iteration_s(both) == 0.080


def test_an_empty_iteration_takes_no_time() -> None:
    times = Times(PROFILE)
    assert times.iteration_s(IterationShape()) == 0.0


@given(PROFILES, st.floats(0.25, 8.0), TOKENS, TOKENS, st.integers(1, 64))
def test_the_factor_multiplies_every_prediction(
    profile: Profile, factor: float, tokens: int, past: int, batch: int
) -> None:
    plain, slowed = Times(profile), Times(profile, factor)
    assert slowed.decode_s(batch, past) == plain.decode_s(batch, past) * factor
    assert slowed.prefill_s(tokens, past) == plain.prefill_s(tokens, past) * factor
    assert slowed.chunk_s(tokens, past, batch) == plain.chunk_s(tokens, past, batch) * factor


@given(PROFILES, TOKENS, TOKENS, st.integers(1, 64), TOKENS)
def test_a_mixed_iteration_takes_between_its_parts_and_their_sum(
    profile: Profile, tokens: int, past: int, batch: int, context: int
) -> None:
    times = Times(profile)
    decode_s, prefill_s = times.decode_s(batch, context), times.prefill_s(tokens, past)
    shape = IterationShape(
        decode_batch=batch,
        decode_context_tokens=context,
        prefill_tokens=tokens,
        prefill_past_tokens=past,
    )
    assert decode_s <= times.iteration_s(shape) <= decode_s + prefill_s
