"""Grammars of answers, as llguidance reads them: checked by the gateway, followed by the engines.

Where a node follows one is `mesh_nodes.engines.grammars`. Before: a protocol has read what a client
wants. After: an invocation that can be answered, or InvalidInput with what is wrong.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.text.thoughts import CLOSE, OPEN, Thinking

GRAMMAR_CHARS_MAX = 1 << 16
CHOICES_MAX = 1024
CHECKED_MAX = 1024
"""Grammars of which it is known what is wrong with them, if anything."""
BLANKS = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between the parts of a JSON value: small models else go on with blanks for ever."""
_START = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|\b(start)\b')
"""Of a grammar in Lark's notation: its first rule's name, told from what is quoted or a comment."""
ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}')


def json_grammar(schema: Any) -> Grammar:
    """Of JSON that a schema describes: the schema as data, or as text."""
    if schema is True:
        schema = {}
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """One of these texts. Raises InvalidInput for none, or too many."""
    if not 1 <= len(choices) <= CHOICES_MAX or not all(choices):
        raise InvalidInput(
            f"{len(choices)} choices; there must be 1 to {CHOICES_MAX}, none of them empty",
            field="grammar",
        )
    one_of = " | ".join(json.dumps(choice) for choice in choices)
    return Grammar(kind=GrammarKind.LARK, text=f"start: {one_of}")


def after_thought(grammar: Grammar, thinking: Thinking) -> Grammar:
    """Of an answer that keeps to the grammar once it has thought aloud, which is free. Raises
    InvalidInput.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                schema = json.loads(grammar.text)
            except ValueError as error:
                raise InvalidInput(f"the schema is no JSON: {error}", field="grammar") from error
            if isinstance(schema, dict):
                schema.setdefault("x-guidance", {"whitespace_pattern": BLANKS})
            answer = f"answer_: %json {json.dumps(schema, ensure_ascii=False)}"
        case GrammarKind.REGEX:
            slashes = re.sub(r"(?s)\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], grammar.text)
            answer = f"answer_: /{slashes}/"
        case GrammarKind.LARK:
            answer = _START.sub(lambda m: "answer_" if m[1] else m[0], grammar.text)
    thought = "thought_ gap_" if thinking.amid else "(thought_ gap_)?"
    rules = [f"start: {thought} answer_", *_thought(thinking), r"gap_: /\s{0,4}/", answer]
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))


def _thought(thinking: Thinking) -> Sequence[str]:
    """Rules. Patterns match no token that is a mark by itself, which still may be spelled."""
    begun = "" if thinking.amid else OPEN
    if not thinking.by_tokens:
        return [rf"thought_[lazy]: /{begun}(?s:.*)<\/think>/"]
    spelled = r"spelled_[lazy]: /(?s:.*)<\/think>/"
    return [f"thought_: {begun} (spelled_ | words_ {CLOSE})", spelled, "words_: /(?s:.*)/"]


def compiled(grammar: Grammar) -> str:
    """As llguidance takes it. Raises ValueError where the schema is no JSON."""
    from llguidance import LLMatcher  # 20 ms, and most calls want none

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                grammar.text, defaults={"whitespace_pattern": BLANKS}
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidInput, with what of it cannot be kept to. Takes milliseconds, the first time."""
    if len(grammar.text) > GRAMMAR_CHARS_MAX:
        raise InvalidInput(
            f"the {grammar.kind} has {len(grammar.text)} characters; "
            f"at most {GRAMMAR_CHARS_MAX} are allowed",
            field="grammar",
        )
    wrong = _wrong(grammar)
    if wrong:
        raise InvalidInput(f"the {grammar.kind} cannot be kept to: {wrong}", field="grammar")


@lru_cache(maxsize=CHECKED_MAX)
def _wrong(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    try:
        failed, said = LLMatcher.validate_grammar_with_warnings(compiled(grammar))
    except ValueError as error:
        return str(error)
    return said[0].strip() if failed else ""
