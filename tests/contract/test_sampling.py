"""Contract: seeded sampling is a function of the request, and parameters do what they say."""

from dataclasses import replace

import pytest

from mesh.domain.request import SamplingParams
from tests.contract.driving import Driver, greedy

PROMPT = tuple(range(5, 45))
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=1)


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(driver: Driver) -> None:
    first = driver.run("a", PROMPT, SAMPLED)
    assert driver.run("b", PROMPT, SAMPLED) == first
    assert driver.run("c", PROMPT, replace(SAMPLED, seed=2)) != first


def test_seeded_tokens_do_not_depend_on_the_rest_of_the_batch(driver: Driver) -> None:
    alone = {
        seed: driver.run(f"alone-{seed}", PROMPT, replace(SAMPLED, seed=seed)) for seed in (1, 2, 3)
    }
    together = {}
    driver.submit("greedy", PROMPT[::-1], greedy(40))
    for seed in (3, 1, 2):
        together[seed] = driver.submit(f"r-{seed}", PROMPT, replace(SAMPLED, seed=seed))
        driver.step(23)
    driver.finish()
    assert {seed: running.tokens for seed, running in together.items()} == alone


def test_a_large_seed_is_a_seed(driver: Driver) -> None:
    large = replace(SAMPLED, seed=2**63 - 1)
    assert driver.run("a", PROMPT, large) == driver.run("b", PROMPT, large)


def test_temperature_0_is_greedy_whatever_the_other_fields_say(driver: Driver) -> None:
    plain = driver.run("plain", PROMPT, greedy(24))
    dressed = replace(greedy(24), seed=9, top_p=0.3, top_k=7)
    assert driver.run("dressed", PROMPT, dressed) == plain


def test_top_k_1_is_greedy_at_any_temperature(driver: Driver) -> None:
    plain = driver.run("plain", PROMPT, greedy(24))
    assert driver.run("narrow", PROMPT, replace(SAMPLED, top_k=1, temperature=5.0)) == plain


def test_min_p_1_is_greedy_at_any_temperature(driver: Driver) -> None:
    plain = driver.run("plain", PROMPT, greedy(24))
    assert driver.run("sure", PROMPT, replace(SAMPLED, min_p=1.0, temperature=5.0)) == plain


def test_presence_and_frequency_penalties_are_the_same_after_a_move(driver: Driver) -> None:
    """What they know follows from the tokens: a request that comes with its first half goes on."""
    plain = driver.run("plain", PROMPT, greedy(40))
    for name, sampling in (
        ("presence", replace(greedy(40), presence_penalty=2.0)),
        ("frequency", replace(greedy(40), frequency_penalty=2.0)),
    ):
        penalised = driver.run(name, PROMPT, sampling)
        assert penalised != plain
        moved = driver.submit(f"{name}, moved", PROMPT, sampling, output=penalised[:17])
        driver.finish()
        assert moved.tokens == penalised[17:]


def test_log_probabilities_come_with_each_token_that_was_asked_about(driver: Driver) -> None:
    asked = driver.submit("asked", PROMPT, replace(greedy(10), logprobs=5))
    drawn = driver.submit("drawn", PROMPT, replace(SAMPLED, max_tokens=10, logprobs=0))
    silent = driver.submit("silent", PROMPT, greedy(10))
    driver.finish()
    assert asked.tokens == silent.tokens
    assert (len(asked.logprobs), len(drawn.logprobs), silent.logprobs) == (10, 10, [])
    for token_id, told in zip(asked.tokens, asked.logprobs, strict=True):
        assert told.top[0] == (token_id, told.logprob)
        values = [logprob for _, logprob in told.top]
        assert values == sorted(values, reverse=True)
        assert len(told.top) <= 5
        assert values[0] <= 0
    assert all(told.logprob <= 0 and not told.top for told in drawn.logprobs)


def test_a_prompt_is_told_about_as_its_tokens_were_when_they_came(driver: Driver) -> None:
    """In chunks, beside others, and whatever of it is cached; a request that goes on tells none."""
    said = driver.submit("said", PROMPT, replace(greedy(20), logprobs=2), salt="s")
    driver.finish()
    whole = (*PROMPT, *said.tokens)
    asking = replace(greedy(3), prompt_logprobs=2)
    other = driver.submit("other", PROMPT[::-1], greedy(12))
    asked = driver.submit("asked", whole, asking)
    alone = driver.submit("alone", whole[:1], replace(asking, prompt_logprobs=0))
    moved = driver.submit("moved", PROMPT, replace(asking, max_tokens=25), output=said.tokens)
    for _ in range(4):
        driver.step(13)
    driver.finish()
    assert (other.prompt_logprobs, alone.prompt_logprobs, moved.prompt_logprobs) == ((), (), ())
    assert len(asked.prompt_logprobs) == len(whole) - 1
    for before, after in zip(said.logprobs, asked.prompt_logprobs[len(PROMPT) - 1 :], strict=True):
        assert after.logprob == pytest.approx(before.logprob, abs=0.02)
        assert len(after.top) == len(before.top)
        for (_, told), (_, expected) in zip(after.top, before.top, strict=True):
            assert told == pytest.approx(expected, abs=0.02)


def test_a_repetition_penalty_changes_the_output(driver: Driver) -> None:
    """A strong one makes a request of few tokens repeat less."""
    plain = driver.run("plain", PROMPT, greedy(40))
    penalised = driver.run("penalised", PROMPT, replace(greedy(40), repetition_penalty=1.8))
    assert penalised != plain
    assert len(penalised) == 40
