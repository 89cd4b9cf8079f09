"""Rates add up to the load, and prompts have exactly the tokens asked for."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads.prompts import Prompts, encoded, sentences_shipped
from mesh_workloads.rates import Lognormal, Rates, Zipf

LAWS = st.one_of(
    st.builds(Zipf, exponent=st.floats(0, 10)), st.builds(Lognormal, sigma=st.floats(0, 10))
)


@given(LAWS, st.integers(1, 300), st.floats(0.001, 1000))
def test_rates_descend_and_add_up(law: Rates, functions: int, total_per_s: float) -> None:
    rates = law.rates_per_s(functions, total_per_s)
    assert len(rates) == functions
    assert math.fsum(rates) == pytest.approx(total_per_s)
    assert min(rates) > 0
    assert all(a >= b or a == pytest.approx(b) for a, b in pairwise(rates))


def test_zipf_falls_with_the_rank() -> None:
    rates = Zipf(exponent=2.0).rates_per_s(10, 1.0)
    assert rates[0] / rates[4] == pytest.approx(25.0)


def test_the_logarithms_of_lognormal_rates_deviate_by_sigma() -> None:
    logs = [math.log(rate) for rate in Lognormal(sigma=1.5).rates_per_s(5000, 1.0)]
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / len(logs))
    assert deviation == pytest.approx(1.5, rel=0.01)


def test_the_busiest_tenth_has_its_share() -> None:
    """What the LLM-Mesh load's busiest 13 of 128 functions have: 75 %."""
    rates = Lognormal(sigma=1.91).rates_per_s(128, 1.0)
    assert sum(rates[:13]) == pytest.approx(0.754, abs=0.06)


@pytest.mark.parametrize(
    ("law", "functions", "total_per_s"),
    [
        (Zipf(exponent=-1.0), 1, 1.0),
        (Lognormal(sigma=math.nan), 1, 1.0),
        (Zipf(exponent=1.0), 0, 1.0),
        (Zipf(exponent=1.0), 1_000_000, 1.0),
        (Zipf(exponent=1.0), 1, 0.0),
        (Zipf(exponent=1.0), 1, math.inf),
    ],
)
def test_parameters_are_bounded(law: Rates, functions: int, total_per_s: float) -> None:
    with pytest.raises(InvalidInput):
        law.rates_per_s(functions, total_per_s)


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


PROMPTS = Prompts(encoded(by_bytes), seed=1)


@given(number=st.integers(0, 10**6), tokens=st.integers(1, 5000))
def test_a_prompt_has_its_length_and_the_text_s_sentences(number: int, tokens: int) -> None:
    prompt = PROMPTS.prompt(number, tokens)
    assert len(prompt) == tokens
    text = bytes(prompt).decode()
    whole = re.match(f"(?: (?:{'|'.join(map(re.escape, sentences_shipped()))}))*", text)
    assert whole is not None
    rest = text[whole.end() :]
    assert any(f" {sentence}".startswith(rest) for sentence in sentences_shipped())


def test_prompts_differ_and_are_the_same_in_every_run() -> None:
    some = [PROMPTS.prompt(number, 200) for number in range(500)]
    assert len(set(some)) > 480
    assert some == [Prompts(encoded(by_bytes), seed=1).prompt(number, 200) for number in range(500)]
    assert some[0] != Prompts(encoded(by_bytes), seed=2).prompt(0, 200)


def test_the_text_is_many_sentences() -> None:
    sentences = sentences_shipped()
    assert len(set(sentences)) == len(sentences) == 50


def test_a_tokenizer_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no tokens"):
        encoded(lambda text: [])
