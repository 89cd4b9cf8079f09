"""Sampled tokens follow the distribution that the parameters ask for, and (seed, index) alone."""

from dataclasses import replace

import numpy as np
import pytest

from mesh.domain.request import SamplingParams, TokenBias
from mesh_nodes.engines.philox import philox, uniforms
from mesh_nodes.engines.sampling import Draw, Past, choose, choose_telling

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)
DRAWS = 2000
CHI_DRAWS = 2_000


def frequencies(
    params: SamplingParams, logits: np.ndarray = LOGITS, count: int = DRAWS
) -> np.ndarray:
    """Shares of the tokens drawn for one seed and many indices, 50 rows at a time."""
    counts = np.zeros(logits.size)
    for first in range(0, count, 50):
        draws = [Draw(params, 11, index, None) for index in range(first, first + 50)]
        for token in choose(np.tile(logits, (50, 1)), draws):
            counts[token] += 1
    return counts / count


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_shapes_the_distribution(temperature: float) -> None:
    drawn = frequencies(SamplingParams(temperature=temperature))
    np.testing.assert_allclose(drawn, softmax(LOGITS / temperature), atol=0.03)


def test_top_k_keeps_the_k_most_likely_in_their_proportions() -> None:
    drawn = frequencies(SamplingParams(temperature=1.0, top_k=3))
    np.testing.assert_allclose(drawn[:3], softmax(LOGITS[:3]), atol=0.03)
    assert drawn[3:].sum() == 0


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    """Shares are 0.55, 0.20, 0.12, …: 0.70 needs two tokens, 0.80 three."""
    assert np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_p=0.70))).size == 2
    assert np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_p=0.80))).size == 3
    assert np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_p=1e-6))).size == 1


def test_top_p_works_where_the_nucleus_is_most_of_a_large_vocabulary() -> None:
    """Flat logits: the first guess at the nucleus is too small and must be widened."""
    logits = np.zeros(5000, np.float32)
    kept = np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_p=0.5), logits))
    assert kept.max() == pytest.approx(2500, abs=30)


def test_top_p_looks_again_where_unlikely_tokens_are_much_of_the_nucleus() -> None:
    """One likely token of weight 1 and 60,000 of 0.00005 each: half of all 4 is that one token and
    20,000 of the others, which the first look leaves out."""
    logits = np.full(60_001, np.log(5e-5), np.float32)
    logits[0] = 0.0
    params = SamplingParams(temperature=1.0, top_p=0.5)
    drawn = [choose(logits[None], [Draw(params, 11, index, None)])[0] for index in range(60)]
    assert 0 in drawn
    assert 15_000 < max(drawn) <= 20_001


def test_top_k_and_top_p_combine() -> None:
    drawn = frequencies(SamplingParams(temperature=1.0, top_k=3, top_p=0.75))
    assert np.flatnonzero(drawn).tolist() == [0, 1]


def test_draws_are_distributed_as_asked() -> None:
    """Chi-square over 4,000 draws from a vocabulary of many columns and a remainder, flat and with
    few likely tokens, all of it, its nucleus and its top 50; the statistic's mean is its degrees of
    freedom, and six standard deviations above it are never reached by chance.
    """
    rng = np.random.default_rng(3)
    flat = (rng.standard_normal(6_003) * 1.5).astype(np.float32)
    peaked = flat.copy()
    peaked[[5, 2500, 6_002]] += np.float32(11)
    cases = [
        (logits, SamplingParams(temperature=0.9, top_p=top_p, top_k=top_k))
        for logits in (flat, peaked)
        for top_p, top_k in ((1.0, 0), (0.8, 0), (1.0, 50))
    ]
    for logits, params in cases:
        expected = softmax(logits.astype(np.float64) / 0.9)
        order = np.argsort(-expected)
        if params.top_p < 1:
            order = order[: int(np.searchsorted(expected[order].cumsum(), params.top_p)) + 1]
        elif params.top_k:
            order = order[: params.top_k]
        counts = np.zeros(logits.size)
        for first in range(0, CHI_DRAWS, 500):
            draws = [Draw(params, 4, index, None) for index in range(first, first + 500)]
            np.add.at(counts, choose(np.broadcast_to(logits, (500, logits.size)), draws), 1)
        assert counts[order].sum() == CHI_DRAWS
        # By likelihood, in groups of tokens that are expected often enough.
        share = expected[order] / expected[order].sum()
        group = (share.cumsum() * 160).astype(int)
        wanted = np.bincount(group, share) * CHI_DRAWS
        drawn = np.bincount(group, counts[order])
        wanted, drawn = wanted[wanted > 5], drawn[wanted > 5]
        statistic = ((drawn - wanted) ** 2 / wanted).sum()
        freedom = wanted.size - 1
        assert statistic < freedom + 6 * np.sqrt(2 * max(freedom, 1)) + 6, params


def test_equal_logits_are_kept_by_their_ids() -> None:
    """Top-k and top-p keep as many as they should where the last ones tie."""
    logits = np.zeros(30_000, np.float32)
    few = frequencies(SamplingParams(temperature=1.0, top_k=3), logits, 100)
    assert np.flatnonzero(few).tolist() == [0, 1, 2]
    half = np.flatnonzero(frequencies(SamplingParams(temperature=1.0, top_p=0.5), logits, 200))
    assert half.max() < 15_010


def test_a_draw_depends_on_seed_and_index_and_not_on_its_row() -> None:
    params = SamplingParams(temperature=1.5)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 300)).astype(np.float32)
    draws = [
        Draw(params, seed, index, None) for seed, index in zip(range(6), range(6), strict=True)
    ]
    together = choose(logits, draws)
    assert together == [choose(logits[n : n + 1], [draws[n]])[0] for n in range(6)]
    tokens = {choose(logits[:1], [replace(draws[0], index=n)])[0] for n in range(50)}
    assert len(tokens) > 10
    tokens = {choose(logits[:1], [replace(draws[0], seed=-n)])[0] for n in range(50)}
    assert len(tokens) > 10


def test_rows_of_all_kinds_share_a_batch() -> None:
    past = Past([0], [4], 6)
    greedy = SamplingParams()
    draws = [
        Draw(greedy, 0, 0, None),
        Draw(replace(greedy, repetition_penalty=4.0), 0, 0, past),
        Draw(replace(greedy, temperature=1.0, top_k=1), 0, 0, None),
    ]
    assert choose(np.tile(LOGITS, (3, 1)), draws) == [0, 1, 0]


def test_the_penalty_lowers_seen_tokens_whatever_their_sign() -> None:
    """2.0 / 4 falls below 1.0, and -0.1 * 4 below -0.3."""
    params = SamplingParams(repetition_penalty=4.0)
    for values, seen_token, expected in (([2.0, 1.0], 0, 1), ([-0.1, -0.3], 0, 1)):
        logits = np.array([values], np.float32)
        past = Past([seen_token], [], 2)
        assert choose(logits, [Draw(params, 0, 0, past)]) == [expected]


def test_biases_are_added_before_the_penalties() -> None:
    biases = (TokenBias(token_id=1, bias=3.0), TokenBias(token_id=0, bias=-100.0))
    params = SamplingParams(logit_bias=biases, repetition_penalty=2.0)
    logits = np.array([[2.0, 1.0, 0.5]], np.float32)
    assert choose(logits, [Draw(params, 0, 0, Past([1], [], 3))]) == [1]
    np.testing.assert_allclose(logits[0], [-98.0, 2.0, 0.5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_ends_a_request_before_it_has_its_tokens(temperature: float) -> None:
    """Ids that the model has no logits of are no matter."""
    params = SamplingParams(temperature=temperature, top_p=0.3, min_tokens=3)
    logits = np.array([[9.0, 8.0, 1.0, 0.0]], np.float32)
    drawn = [
        choose(logits.copy(), [Draw(params, 5, index, None, end_ids=(0, 1, 70))])[0]
        for index in range(5)
    ]
    assert drawn == [2, 2, 2, 0, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e300, min_tokens=9),
        SamplingParams(temperature=1e300, min_tokens=9, top_p=0.9),
        SamplingParams(temperature=1.0, min_tokens=9, repetition_penalty=1e300),
        SamplingParams(temperature=1.0, min_tokens=9, repetition_penalty=1e-300),
    ],
)
def test_however_large_or_small_a_parameter_is_a_token_is_drawn(params: SamplingParams) -> None:
    logits = np.array([[2.0, 1.0, 0.0, 0.0]], np.float32)
    for index in range(8):
        past = Past([0, 1, 2], [], 4)
        assert choose(logits.copy(), [Draw(params, 5, index, past, end_ids=(3,))])[0] < 3


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    """Token 0 came three times, 1 once, 2 in the prompt."""
    past = Past([2, 2], [0, 1, 0, 0], 4)
    for sampling, expected in (
        (SamplingParams(presence_penalty=0.5), [1.5, 0.5, 0.5, 0.0]),
        (SamplingParams(frequency_penalty=0.5), [0.5, 0.5, 0.5, 0.0]),
        (SamplingParams(presence_penalty=-0.5, frequency_penalty=1.0), [-0.5, 0.5, 0.5, 0.0]),
    ):
        logits = np.array([[2.0, 1.0, 0.5, 0.0]], np.float32)
        choose(logits, [Draw(sampling, 0, 0, past)])
        np.testing.assert_allclose(logits[0], expected)


def test_min_p_keeps_what_is_likely_beside_the_likeliest() -> None:
    """Shares of the likeliest are 1, 0.37, 0.22, 0.14, …; temperature goes first."""
    for min_p, temperature, kept in ((0.3, 1.0, 2), (0.2, 1.0, 3), (1.0, 5.0, 1), (0.3, 2.0, 4)):
        drawn = frequencies(SamplingParams(temperature=temperature, min_p=min_p))
        assert np.flatnonzero(drawn).tolist() == list(range(kept))
        np.testing.assert_allclose(drawn[:kept], softmax(LOGITS[:kept] / temperature), atol=0.03)
    both = frequencies(SamplingParams(temperature=1.0, min_p=0.01, top_k=5, top_p=0.7))
    assert np.flatnonzero(both).tolist() == [0, 1]


def test_log_probabilities_are_the_models_whatever_was_drawn() -> None:
    params = SamplingParams(temperature=3.0, presence_penalty=2.0, top_k=1, logprobs=3)
    logits = np.tile(LOGITS, (2, 1))
    draws = [Draw(params, 0, 0, Past([], [0], 6)), Draw(SamplingParams(), 0, 0, None)]
    (token, (told,)), (greedy, nothing) = choose_telling(logits, draws)
    expected = np.log(softmax(LOGITS))
    assert (token, greedy, nothing) == (1, 0, ())
    assert told.logprob == pytest.approx(expected[1], abs=1e-5)
    assert [token_id for token_id, _ in told.top] == [0, 1, 2]
    np.testing.assert_allclose([logprob for _, logprob in told.top], expected[:3], atol=1e-5)


def test_philox_gives_the_published_numbers() -> None:
    """The known answers of Random123 for philox4x32, 10 rounds."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]
    for counter, key, expected in cases:
        c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
        k0, k1 = (np.array([word], np.uint64) for word in key)
        assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == expected


def test_uniforms_are_uniform_and_take_any_seed() -> None:
    numbers = uniforms([2**64 - 1] * 4000, list(range(4000)), 1)
    assert 0.0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.02
    assert uniforms([-1], [5], 1) == uniforms([2**64 - 1], [5], 1)
    assert uniforms([7], [5], 9)[0, 6:].tolist() == uniforms([7], [5], 3, first=6)[0].tolist()
    assert len(set(uniforms([7], [5], 9)[0].tolist())) == 9
