"""Calls of tools are read while they come, however the answer is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from mesh.domain.text import TextAssets, ToolFormat
from mesh.text.grammars import check_grammar
from mesh.text.tokenizer import TextCodec
from mesh.text.tool_calls import Arguments, CallBegun, Text, ToolReader, calls_grammar, format_of
from tests.text.conftest import tiny_assets
from tests.text.test_grammars import accepts

HERMES, LLAMA3 = ToolFormat.HERMES, ToolFormat.LLAMA3
WEATHER = '{"name": "weather", "arguments": {"city": "a \\"}\\" {b", "days": [1, {"x": {}}]}}'
CALLED = ("weather", {"city": 'a "}" {b', "days": [1, {"x": {}}]})
ANSWERS = [
    (HERMES, "just words", ["just words"], []),
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", [], [CALLED]),
    (HERMES, f"I look. \n<tool_call>{WEATHER}</tool_call>\n", ["I look."], [CALLED]),
    (
        HERMES,
        f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>",
        [],
        [CALLED, CALLED],
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [], [("f", {"a": 1})]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no"}</tool_call>', None, []),
    (HERMES, "<tool_call>no JSON</tool_call> and on", None, []),
    (HERMES, '<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
    (LLAMA3, '{"name": "\\q", "parameters": {}}', None, []),
    (LLAMA3, '{"name": "\\ud800", "parameters": {}}', None, []),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
        [],
        [("f", {"a": "\ud800"})],
    ),
    (HERMES, "a < b, <tool_cal", ["a < b, <tool_cal"], []),
    (HERMES, "<tool_call>torn", ["<tool_call>torn"], []),
    (LLAMA3, WEATHER.replace("arguments", "parameters"), [], [CALLED]),
    (LLAMA3, f"<|python_tag|>{WEATHER}", [], [CALLED]),
    (LLAMA3, f"{WEATHER}; {WEATHER}", [], [CALLED, CALLED]),
    (LLAMA3, '{"parameters": {}, "name": "f"}', [], [("f", {})]),
    (LLAMA3, '{"answer": 42}', ['{"answer": 42}'], []),
    (LLAMA3, "words {}", ["words {}"], []),
]


@pytest.mark.parametrize(("form", "answer", "words", "called"), ANSWERS)
@given(cuts=st.sets(st.integers(1, 120)))
def test_however_it_is_cut_an_answer_says_the_same(
    form: ToolFormat,
    answer: str,
    words: list[str] | None,
    called: list[tuple[str, object]],
    cuts: set[int],
) -> None:
    reader, said = ToolReader(form), []
    places = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
    for begin, end in pairwise(places):
        said += reader.push(answer[begin:end])
    said += reader.finish()
    text = "".join(one.text for one in said if isinstance(one, Text))
    names = [one.name for one in said if isinstance(one, CallBegun)]
    pieces = [""] * len(names)
    for one in said:
        if isinstance(one, Arguments):
            pieces[one.index] += one.text
    assert [(name, json.loads(each)) for name, each in zip(names, pieces, strict=True)] == called
    assert reader.calls == len(called)
    assert text == (answer if words is None else "".join(words))


def test_arguments_are_told_as_they_come() -> None:
    reader = ToolReader(HERMES)
    assert reader.push('<tool_call>\n{"name": "f", "argu') == []
    assert reader.push('ments": {"a"') == [CallBegun(0, "f"), Arguments(0, '{"a"')]
    assert reader.push(": 1") == [Arguments(0, ": 1")]
    assert reader.push("}}\n</tool_call>") == [Arguments(0, "}")]
    assert reader.finish() == []


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tools>…</tools> <tool_call>{% endif %}", HERMES),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA3),
        ("{{ tools }} some other way", ToolFormat.NONE),
        ("{{ messages }}", ToolFormat.NONE),
        (None, ToolFormat.NONE),
    ],
)
def test_the_template_tells_how_tools_are_called(template: str | None, form: ToolFormat) -> None:
    assert format_of(template) is form


@pytest.mark.parametrize("form", list(ToolFormat))
def test_a_call_that_is_required_has_a_grammar(form: ToolFormat) -> None:
    schemas = {
        "f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "g": {"type": "object", "properties": {}},
    }
    check_grammar(calls_grammar(form, schemas, several=True))
    check_grammar(calls_grammar(form, {"f": schemas["f"]}, several=False))


A, TEXT = {"const": 1}, {"type": "string"}
CLOSED = {"type": "object", "required": ["a"], "additionalProperties": False}


def takes(a: Any, **more: Any) -> dict[str, Any]:
    return {**CLOSED, "properties": {"a": a}, **more}


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (takes({"$ref": "#/$defs/A"}, **{"$defs": {"A": A}}), 1, 2),
        (takes({"$ref": "#/definitions/A"}, definitions={"A": A}), 1, 2),
        (
            takes({"$ref": "#/$defs/B"}, **{"$defs": {"A": A, "B": {"$ref": "#/$defs/A"}}}),
            1,
            2,
        ),
        (takes({"anyOf": [{"$ref": "#"}, TEXT]}), {"a": {"a": "x"}}, {"a": 1}),
        (takes({"$ref": "#/$defs/x~1y"}, **{"$defs": {"x/y": A}}), 1, 2),
        (takes({"$ref": "#n"}, **{"$defs": {"N": {"$anchor": "n", **A}}}), 1, 2),
        (takes({"$ref": "#/$defs/A"}, **{"$id": "http://x/y", "$defs": {"A": A}}), 1, 2),
        (takes({"$ref": "http://x/y#/$defs/A"}, **{"$id": "http://x/y", "$defs": {"A": A}}), 1, 2),
        (
            takes(
                {"$ref": "http://x/n"},
                **{
                    "$defs": {
                        "A": TEXT,
                        "N": {"$id": "http://x/n", "$ref": "#/$defs/A", "$defs": {"A": A}},
                    }
                },
            ),
            1,
            "x",
        ),
        (
            takes({"$ref": "#/properties/b"}, properties={"a": {"$ref": "#/properties/b"}, "b": A}),
            1,
            2,
        ),
        (
            takes(
                {"type": "array", "items": {"$ref": "#/$defs/A"}, "minItems": 1},
                **{"$defs": {"A": A}},
            ),
            [1],
            [2],
        ),
        (takes({"const": {"$ref": "#/x"}}), {"$ref": "#/x"}, {"$ref": "#/y"}),
        (takes({"type": "string", "format": "path"}), "/tmp", 1),
    ],
)
def test_references_lead_to_the_schema_of_their_own_tool(
    form: ToolFormat, schema: dict[str, Any], right: Any, wrong: Any
) -> None:
    """Also where another tool has the same names for other things."""
    other = takes({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"const": "other"}}})
    for schemas in ({"f": schema}, {"g": other, "f": schema}):
        grammar = calls_grammar(form, schemas, several=False)
        for a, fits in ((right, True), (wrong, False)):
            assert accepts(grammar, written(form, "f", a)) is fits


def written(form: ToolFormat, name: str, a: Any) -> str:
    key = "arguments" if form is HERMES else "parameters"
    call = json.dumps({"name": name, key: {"a": a}})
    return f"<tool_call>\n{call}\n</tool_call>" if form is HERMES else call


MARKS = ("<tool_call>", "</tool_call>")


def codec_with(*marks: AddedToken) -> TextCodec:
    tokenizer = Tokenizer.from_str(tiny_assets().tokenizer_json.decode())
    tokenizer.add_tokens(list(marks))
    return TextCodec(TextAssets(tokenizer_json=tokenizer.to_str().encode()))


def test_a_call_that_is_required_has_the_tokens_with_which_the_model_calls_by_itself() -> None:
    """As Qwen's vocabularies have them. A special one is left out of an answer's text."""
    codec = codec_with(*(AddedToken(mark, special=False) for mark in MARKS))
    assert codec.calls_by_tokens
    for special in (True, False):
        marks = [AddedToken(MARKS[0], special=False), AddedToken(MARKS[1], special=True)]
        assert not codec_with(*marks[: 1 + special]).calls_by_tokens
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    said = '\n{"name": "f", "arguments": {"a": 1}}\n'
    answer = f"{MARKS[0]}{said}{MARKS[1]}\n{MARKS[0]}{said}{MARKS[1]}"
    spelled = [token for char in answer for token in codec.encode(char)]
    vocabulary = LLTokenizer(
        codec._tokenizer.to_str(), n_vocab=codec.vocabulary_tokens, eos_token=[0]
    )
    for by_tokens in (True, False):
        grammar = calls_grammar(HERMES, schemas, several=True, by_tokens=by_tokens)
        assert accepts(grammar, codec.encode(answer), vocabulary) is by_tokens
        assert accepts(grammar, spelled, vocabulary) is not by_tokens
