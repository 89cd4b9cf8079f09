"""Prompts have exactly the tokens asked for, are the text's, and differ from each other."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh_workloads.prompts import Prompts, encoded, sentences_shipped


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
