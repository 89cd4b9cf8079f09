"""Which grammars can be kept to, and what is said of those that cannot."""

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.text import TextAssets
from mesh.text.grammars import (
    ANY_OBJECT,
    CHOICES_MAX,
    GRAMMAR_CHARS_MAX,
    _bytes_and,
    after_thought,
    check_grammar,
    choice_grammar,
    compiled,
    json_grammar,
)
from mesh.text.schemas import loosened
from mesh.text.thoughts import Thinking
from mesh.text.tokenizer import TextCodec
from tests.text.conftest import tiny_assets

LIST = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}]}}}


@pytest.mark.parametrize(
    "grammar",
    [
        ANY_OBJECT,
        json_grammar({"type": "array", "items": {"type": "number"}, "maxItems": 3}),
        json_grammar({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object"}}}),
        json_grammar(True),
        choice_grammar(["ja", 'nein "gar nicht"', "ü\n"]),
        Grammar(kind=GrammarKind.REGEX, text="[0-9]{1,3}(,[0-9]{3})*"),
        Grammar(kind=GrammarKind.LARK, text='start: "a" | "b" start'),
        Grammar(kind=GrammarKind.LARK, text='start: ("a" start)?'),
        Grammar(kind=GrammarKind.LARK, text='start: "a" ("," start)* "b"'),
        Grammar(kind=GrammarKind.LARK, text='start: "[" [start] "]"'),
        Grammar(kind=GrammarKind.LARK, text=f"start: %json {json.dumps(LIST)}"),
        Grammar(kind=GrammarKind.REGEX, text="[a-z]{1,100000}"),
        json_grammar(LIST),
        json_grammar({"type": "array", "items": {"$ref": "#"}}),
        json_grammar({"properties": {"a": {"format": "nope", "type": "string"}}}),
        json_grammar({"type": "string", "format": "password"}),
        json_grammar({"properties": {"format": {"type": "string", "format": "path"}}}),
    ],
)
def test_these_can_be_kept_to(grammar: Grammar) -> None:
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (json_grammar({"type": "foo"}), "Invalid type: foo"),
        (json_grammar("no json"), "Expecting value"),
        (json_grammar({"$ref": "#"}), "can ever end"),
        (json_grammar({"allOf": [{"$ref": "#"}]}), "can ever end"),
        (json_grammar({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "can ever end"),
        (json_grammar({**LIST, "required": ["next"]}), "can ever end"),
        (
            json_grammar({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "can ever end",
        ),
        (Grammar(kind=GrammarKind.LARK, text="start: start"), "can ever end"),
        (Grammar(kind=GrammarKind.LARK, text='start: "a" start'), "can ever end"),
        (Grammar(kind=GrammarKind.LARK, text='start: "a" b\nb: (c | b) "b"\nc: b'), "ever end"),
        (Grammar(kind=GrammarKind.LARK, text='start: "x" %json {"$ref": "#"}'), "can ever end"),
        (Grammar(kind=GrammarKind.LARK, text="start: X\nX: /a/ & /b/"), "no answer fits"),
        (Grammar(kind=GrammarKind.LARK, text="start: <|im_end|> /a{1000000}/"), "too large"),
        (Grammar(kind=GrammarKind.REGEX, text=r"[^\s\S]"), "no answer fits"),
        (Grammar(kind=GrammarKind.REGEX, text="a{1000000}"), "too large"),
        (Grammar(kind=GrammarKind.REGEX, text="(a{1000}){1000}"), "too large"),
        (json_grammar({"type": "string", "pattern": "^b{1000000}$"}), "too large"),
        (Grammar(kind=GrammarKind.REGEX, text="(a"), "unclosed group"),
        (Grammar(kind=GrammarKind.LARK, text="start: x"), "x"),
        (Grammar(kind=GrammarKind.LARK, text="x" * (GRAMMAR_CHARS_MAX + 1)), "characters"),
    ],
)
def test_these_cannot_and_it_is_said_why(grammar: Grammar, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        check_grammar(grammar)
    assert caught.value.field == "grammar"


@pytest.mark.parametrize("choices", [[], [""], ["a"] * (CHOICES_MAX + 1)])
def test_choices_are_some_texts(choices: list[str]) -> None:
    with pytest.raises(InvalidInput, match="choices"):
        choice_grammar(choices)


_NUMBER = {"type": "integer"}
UNENFORCEABLE = {
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "dependencies"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), "object"),
    **dict.fromkeys(("not", "if"), "integer"),
}
"""By keyword, the type that it says more of."""
ENFORCED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":1}'),
    (
        {"type": "object", "patternProperties": {"^a": _NUMBER}, "additionalProperties": False},
        '{"ab":1}',
        '{"b":1}',
    ),
    ({"type": "array", "prefixItems": [_NUMBER], "items": False}, "[1]", "[1,1]"),
    ({"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}, "[1,1]", "[1]"),
    ({"type": "integer", "multipleOf": 3}, "6", "7"),
    ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
    ({"type": "string", "pattern": "^a+$"}, '"aa"', '"ab"'),
    ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    ({"oneOf": [_NUMBER, {"type": "string"}]}, "1", "[]"),
    ({"allOf": [_NUMBER, {"minimum": 3}]}, "3", "2"),
    ({"const": [1]}, "[1]", "[2]"),
    ({"enum": [1, "a"]}, '"a"', "2"),
)


def keeps(grammar: Grammar, answer: str) -> bool:
    """Whether an answer, by its bytes, is one that may end there."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes_and(()), compiled(grammar), log_level=0)
    alphabet = {char: n for n, char in enumerate(sorted(ByteLevel.alphabet()))}
    return matcher.consume_tokens([alphabet[char] for char in answer]) and matcher.is_accepting()


@pytest.mark.parametrize(("schema", "fits", "does_not"), ENFORCED)
@pytest.mark.parametrize("strict", [True, False])
def test_these_keywords_are_kept_to(
    schema: dict[str, Any], fits: str, does_not: str, strict: bool
) -> None:
    grammar = json_grammar(schema, strict=strict)
    check_grammar(grammar)
    assert (keeps(grammar, fits), keeps(grammar, does_not)) == (True, False)


@pytest.mark.parametrize(("key", "kind"), UNENFORCEABLE.items())
def test_what_no_answer_can_be_kept_to_is_refused_by_name_or_left_out(key: str, kind: str) -> None:
    """It depends on whether the schema is strict; a property of that name stays."""
    beside = {"type": kind}
    value: Any = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}}.get(key, {})
    schema = {"type": "object", "properties": {key: {**beside, key: value}}, "required": [key]}
    with pytest.raises(InvalidInput, match=key):
        check_grammar(json_grammar(schema))
    check_grammar(json_grammar(schema, strict=False))
    plain = {**schema, "properties": {key: beside}}
    assert json_grammar(schema, strict=False) == json_grammar(plain)


@pytest.mark.parametrize(
    ("key", "value"), [("uniqueItems", False), ("unevaluatedProperties", True)]
)
def test_a_keyword_that_asks_for_nothing_is_as_none(key: str, value: bool) -> None:
    check_grammar(json_grammar({"type": ["array", "object"], key: value}))


def test_what_pydantic_writes_of_sets_and_decimals_is_kept_to_as_far_as_it_can_be() -> None:
    class Order(BaseModel):
        tags: set[str]
        price: Decimal

    schema = Order.model_json_schema()
    with pytest.raises(InvalidInput, match="uniqueItems"):
        check_grammar(json_grammar(schema))
    grammar = json_grammar(schema, strict=False)
    check_grammar(grammar)
    assert keeps(grammar, '{"tags":["a","a"],"price":"1.5"}')
    assert not keeps(grammar, '{"tags":"a","price":"1.5"}')


def test_of_alternatives_that_overlap_any_will_do_unless_it_is_strict() -> None:
    schema = {"oneOf": [_NUMBER, {"type": "number"}]}
    with pytest.raises(InvalidInput, match="oneOf"):
        check_grammar(json_grammar(schema))
    for more in ({}, {"anyOf": [_NUMBER]}):
        grammar = json_grammar({**schema, **more}, strict=False)
        check_grammar(grammar)
        assert (keeps(grammar, "1"), keeps(grammar, "1.5")) == (True, not more)


def test_alternatives_beside_others_stand_in_what_all_have_to_fit() -> None:
    both = {"anyOf": [{"type": "string"}], "oneOf": [{"minLength": 1}]}
    assert loosened(both) == {
        "anyOf": [{"type": "string"}],
        "allOf": [{"anyOf": [{"minLength": 1}]}],
    }
    for wrong in (None, 5, {"type": "string"}):
        assert loosened({**both, "allOf": wrong})["allOf"] == wrong


def test_schemas_are_taken_as_data_or_text() -> None:
    schema = {"type": "object", "title": "Straße"}
    assert json_grammar(schema) == json_grammar(json.dumps(schema, ensure_ascii=False))


@pytest.mark.parametrize(
    ("thinking", "answer", "kept"),
    [
        (Thinking(amid=True), 'so {be} </thin it\n</think>\n\n{"a": 3}', True),
        (Thinking(amid=True), '{"a": 3}', False),
        (Thinking(amid=True), 'x</think>y</think>{"a": 3}', False),
        (Thinking(amid=False), '<think>{</think>{"a": 3}', True),
        (Thinking(amid=False), '{"a": 3}', True),
        (Thinking(amid=False), 'well, </think>{"a": 3}', False),
    ],
)
def test_grammars_hold_after_the_thought(thinking: Thinking, answer: str, kept: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(after_thought(json_grammar(schema), thinking), answer) is kept


@pytest.mark.parametrize(
    ("begun", "answer", "kept"),
    [
        ("<think>", ['so {be} it\n</think>\n\n{"a": 3}'], True),
        ("<think>", ["so </", 'think>{"a": 3}'], True),
        ("<think>", ["so {be} it, or"], False),
        ("<think>", ['x</think>y</think>{"a": 3}'], False),
        ("", ['<think>\n{\n</think>\n\n{"a": 3}'], True),
        ("", ['{"a": 3}'], True),
        ("", ['well, </think>{"a": 3}'], False),
    ],
)
def test_marks_may_be_tokens_of_their_own(begun: str, answer: list[str], kept: bool) -> None:
    """As Qwen3 and DeepSeek-R1 have them, which no pattern matches. They may be spelled, too."""
    tokenizer = Tokenizer.from_str(tiny_assets().tokenizer_json.decode())
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    made, template = tokenizer.to_str(), "{# until </think> #}" + begun
    codec = TextCodec(TextAssets(tokenizer_json=made.encode(), chat_template=template))
    thinking = codec.thinking("")
    assert thinking == Thinking(amid=bool(begun), by_tokens=True)
    vocabulary = LLTokenizer(made, n_vocab=codec.vocabulary_tokens, eos_token=[0])
    tokens = [token for part in answer for token in codec.encode(part)]
    grammar = after_thought(json_grammar({"type": "object"}), thinking)
    assert accepts(grammar, tokens, vocabulary) is kept


def test_any_grammar_may_come_after_a_thought() -> None:
    path = Grammar(kind=GrammarKind.REGEX, text=r"a/b\/\d+")
    assert accepts(after_thought(path, Thinking(amid=True)), "x</think> a/b/22")
    words = Grammar(kind=GrammarKind.LARK, text='start: word | word start\nword: "start"')
    assert accepts(after_thought(words, Thinking(amid=False)), "<think>x</think>startstart")
    assert not accepts(after_thought(words, Thinking(amid=False)), "start<think>x</think>start")


@pytest.mark.parametrize("comment", ['// say "yes', "# it's a/b", "// start"])
def test_comments_of_a_grammar_say_nothing_of_its_rules(comment: str) -> None:
    grammar = Grammar(kind=GrammarKind.LARK, text=f'{comment}\nstart: /y#"/ "es" {comment}')
    assert accepts(after_thought(grammar, Thinking(amid=True)), 'x</think>y#"es')


BYTES = LLTokenizer("byte")


def accepts(grammar: Grammar, answer: str | Sequence[int], vocabulary: LLTokenizer = BYTES) -> bool:
    check_grammar(grammar)
    matcher = LLMatcher(vocabulary, compiled(grammar))
    tokens = list(answer.encode() if isinstance(answer, str) else answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())
