"""Thoughts and stop strings are told apart from the answer, however it is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.text import ToolFormat
from mesh.text.answer_reader import AnswerReader, Reading
from mesh.text.stops import StopMatcher
from mesh.text.thoughts import Thinking, Thought, thinking_after
from mesh.text.tool_calls import Arguments, CallBegun, Text

AMID, MAY = Thinking(amid=True), Thinking(amid=False)
ANSWERS = [
    (AMID, "\nI see. \n</think>\n\nYes.\n", "I see.", "Yes.\n"),
    (AMID, "never ends </thin", "never ends </thin", ""),
    (AMID, "</think>yes", "", "yes"),
    (AMID, "\n\n</think>\n\n", "", ""),
    (MAY, "<think>\na < b </ c\n</think>\nYes </think>", "a < b </ c", "Yes </think>"),
    (MAY, "\n<think>\n\n</think>\n\nyes", "", "yes"),
    (MAY, "at once, <think> or not", "", "at once, <think> or not"),
    (MAY, "  <thing>", "", "  <thing>"),
    (MAY, "<thi", "", "<thi"),
    (MAY, "", "", ""),
]


@pytest.mark.parametrize(("thinking", "said", "thought", "answer"), ANSWERS)
@given(cuts=st.sets(st.integers(1, 40)))
def test_a_thought_is_told_apart(
    thinking: Thinking, said: str, thought: str, answer: str, cuts: set[int]
) -> None:
    reader = AnswerReader(Reading(thinking))
    places = [0, *sorted(cut for cut in cuts if cut < len(said)), len(said)]
    told = [one for a, b in pairwise(places) for one in reader.push(said[a:b])]
    told += reader.finish()
    assert "".join(one.text for one in told if isinstance(one, Thought)) == thought
    assert "".join(one.text for one in told if isinstance(one, Text)) == answer
    assert all(getattr(one, "text", "") for one in told), "an empty piece is none"


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<assistant><think>\n", AMID),
        ("<assistant>\n<think>\n\n</think>\n\n", None),
        ("<think>earlier</think> said<assistant>", MAY),
    ],
)
def test_a_prompts_end_tells_how_answers_begin(prompt: str, thinking: Thinking | None) -> None:
    assert thinking_after(prompt) == thinking


def test_tools_are_called_after_the_thought_alone() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = AnswerReader(Reading(AMID, ToolFormat.HERMES))
    said = [*reader.push(f"I could {call} </think> {call}"), *reader.finish()]
    assert said == [Thought(f"I could {call}"), CallBegun(0, "f"), Arguments(0, "{}")]
    assert reader.calls == 1


def test_tokens_of_a_thought_are_counted() -> None:
    reader = AnswerReader(Reading(MAY))
    for piece in ("<think>", "so", " be it", "</think>", "yes"):
        reader.push(piece, 1)
    assert reader.thought_tokens == 3


def test_tokens_that_come_together_count_by_their_share_of_the_text() -> None:
    reader = AnswerReader(Reading(AMID))
    reader.push("It is so.", 4)
    reader.push(" Good.</think>Yes, it is.", 8)
    reader.push(" And more.", 3)
    assert reader.thought_tokens == 4 + 2


PIECES = st.lists(st.text("ab", max_size=6), max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The output ends where the first stop string to be complete begins."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)], True
    return text, False


@given(PIECES, STOPS)
def test_the_output_ends_before_the_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.stopped:
            break
    else:
        out += matcher.flush()
    whole, stopped = expected("".join(pieces), stops)
    assert (out, matcher.stopped) == (whole, stopped)


@given(PIECES, STOPS)
def test_nothing_given_out_is_ever_taken_back(pieces: list[str], stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    whole, _ = expected("".join(pieces), stops)
    for piece in pieces:
        out += matcher.push(piece)
        assert whole.startswith(out)
        if matcher.stopped:
            return


def test_without_stop_strings_text_passes_through() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""
