"""The chat benchmark: conversations whose prompts grow, and what is said of them."""

import json
from collections.abc import Sequence

import pytest

from bench.chat import (
    CONVERSATIONS,
    OUTPUT_TOKENS,
    SYSTEM_TOKENS,
    TURN_TOKENS,
    TURNS,
    Answer,
    played,
    report,
)
from mesh.domain.errors import EngineError


class Contender:
    """Answers with the same ids; `told`: whether it says so."""

    def __init__(self, first_s: float, told: bool = True) -> None:
        self.prompts: list[list[int]] = []
        self._answer: Answer = (first_s, [7] * OUTPUT_TOKENS if told else [])

    def __call__(self, prompts: Sequence[list[int]]) -> list[Answer]:
        self.prompts += prompts
        return [self._answer for _ in prompts]


def test_each_turn_has_all_that_was_said_and_contenders_get_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick, silent = Contender(0.1), Contender(0.4, told=False)
    found, made_up = played({"mesh": quick, "mesh, off": quick, "llama.cpp": silent}, 1, 0.0)
    first, second = quick.prompts[:2]
    assert len(first) == SYSTEM_TOKENS + TURN_TOKENS
    assert second[: len(first) + OUTPUT_TOKENS] == [*first, *[7] * OUTPUT_TOKENS]
    assert silent.prompts[0] == first
    assert len(silent.prompts[TURNS - 1]) == len(quick.prompts[TURNS - 1])
    assert made_up == ["llama.cpp"]
    report(found, ["openvino-genai"], made_up).end()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["turn8_ratio_to_best"] == [0.25] * len(CONVERSATIONS)
    assert said["turn8_ratio_to_off"] == [1.0] * len(CONVERSATIONS)
    assert said["made_up_answers"] == ["llama.cpp"]


def test_an_answer_without_a_token_is_an_error_and_no_quick_first_one() -> None:
    with pytest.raises(EngineError, match="turn 1 was answered without a token"):
        played({"mesh": Contender(0.0)}, 1, 0.0)
