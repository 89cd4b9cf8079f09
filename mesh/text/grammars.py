"""Grammars of answers, as llguidance reads them: checked by the gateway, followed by the engines.

Where a node follows one is `mesh_nodes.engines.grammars`. Before: a protocol has read what a client
wants. After: an invocation that can be answered, or InvalidInput with what is wrong.
"""

import json
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.text.schemas import PASSES_MAX, can_end, embedded, loosened
from mesh.text.thoughts import CLOSE, OPEN, Thinking

GRAMMAR_CHARS_MAX = 1 << 16
CHOICES_MAX = 1024
CHECKED_MAX = 1024
"""Grammars of which it is known what is wrong with them, if anything."""
FUEL_INITIAL, FUEL_STEP = 200_000, 100_000
"""The fuel of llguidance's lexer for a check: an engine has five times and twice as much."""
GROUPS_MAX = 4
"""Groups in groups of a rule that are looked at for what may be left out."""
BYTES_TRIED = 8
"""A check tries so many first bytes of an answer."""
BLANKS = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between the parts of a JSON value: small models else go on with blanks for ever."""
_START = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|\b(start)\b')
"""Finds the name of the first rule in a grammar of Lark's notation, and tells it from quoted text
and comments.
"""
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"i?|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/[a-z]*')
_RULE = re.compile(r"^[ \t]*[?!]?([a-zA-Z_]\w*)(?:\.-?\d+)?(?:\[[^\]]*\])?[ \t]*:", re.M)
"""The head of a rule in Lark's notation."""
_LEFT_OUT = re.compile(r"(?:\[[^][]*\]|(?:\([^()]*\)|[\w\"]+)\s*(?:[?*]|\{\s*0?\s*,[^}]*\}|\{0\}))")
"""What an alternative may do without."""
_NEVER = "never_"
_MARK = re.compile(r"<[^<>\s]{1,64}>")
"""What may be a special token's name."""
_END = "<|end|>"
log = logging.getLogger(__name__)
ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}')


def json_grammar(schema: Any, *, strict: bool = True) -> Grammar:
    """The grammar of JSON that a schema describes: the schema as data, or as text. Of data that is
    not `strict` it leaves out what answers cannot be kept to.
    """
    if schema is True:
        schema = {}
    if not strict:
        schema = loosened(schema)
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def choice_grammar(choices: Sequence[str], member: str = "grammar") -> Grammar:
    """One of these texts. Raises InvalidInput, which names the member, for none, or too many."""
    if not 1 <= len(choices) <= CHOICES_MAX or not all(choices):
        raise InvalidInput(
            f"{len(choices)} choices; there must be 1 to {CHOICES_MAX}, none of them empty",
            field=member,
        )
    one_of = " | ".join(json.dumps(choice) for choice in choices)
    return Grammar(kind=GrammarKind.LARK, text=f"start: {one_of}")


def after_thought(grammar: Grammar, thinking: Thinking) -> Grammar:
    """The grammar of an answer that keeps to `grammar` once it has thought aloud, which it does
    freely. Raises InvalidInput.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                schema = json.loads(grammar.text)
            except ValueError as error:
                raise InvalidInput(f"the schema is no JSON: {error}", field="grammar") from error
            schema = embedded(schema)
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
            schema = json.dumps(embedded(json.loads(grammar.text)), ensure_ascii=False)
            return LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": BLANKS}
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidInput, with what of it cannot be kept to. The first check of a grammar takes
    milliseconds, and up to a second where it reaches a bound.
    """
    if len(grammar.text) > GRAMMAR_CHARS_MAX:
        raise InvalidInput(
            f"the {grammar.kind} has {len(grammar.text)} characters; "
            f"at most {GRAMMAR_CHARS_MAX} are allowed",
            field="grammar",
        )
    wrong = _wrong(grammar)
    if wrong:
        log.info("a %s was refused: %s", grammar.kind, wrong)
        raise InvalidInput(f"the {grammar.kind} cannot be kept to: {wrong}", field="grammar")


@lru_cache(maxsize=CHECKED_MAX)
def _wrong(grammar: Grammar) -> str:
    """What is wrong with it, empty if nothing is. Some faults show only when an answer is begun, so
    one is: by bytes and the special tokens that it may name, and with half of the work allowed that
    an engine allows for it.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        text = compiled(grammar)
    except (ValueError, RecursionError) as error:
        return str(error)
    failed, said = LLMatcher.validate_grammar_with_warnings(text)
    if failed:
        return said[0].strip()
    if not _can_end(grammar):
        return "no answer to it can ever end: it contains itself without another way"
    limits = LLParserLimits(
        initial_lexer_fuel=FUEL_INITIAL, step_lexer_fuel=FUEL_STEP, verbose_errors=False
    )
    named = _QUOTED.sub(" ", grammar.text) if grammar.kind is GrammarKind.LARK else ""
    marks = tuple(dict.fromkeys(_MARK.findall(named)))
    matcher = LLMatcher(_bytes_and(marks), text, log_level=0, limits=limits)
    for _ in range(BYTES_TRIED):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped() or not allowed:
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    if matcher.stop_reason() in ("NotStopped", "NoExtension", "EndOfSentence"):
        return ""
    if matcher.get_error().strip().startswith("NoExtensionBias"):
        return "no answer fits it"
    said_first = matcher.get_error().strip().partition("\n")[0]
    return f"it is too large to be kept to ({said_first or matcher.stop_reason()})"


@lru_cache(maxsize=4)
def _bytes_and(marks: tuple[str, ...]) -> Any:
    """A vocabulary for llguidance: each byte, and these special tokens."""
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END, *marks])
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(_END))


def _can_end(grammar: Grammar) -> bool:
    """Whether some answer is finite, as far as references of rules or schemas tell."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return True
        case GrammarKind.LARK:
            return _rules_can_end(grammar.text)
        case GrammarKind.JSON_SCHEMA:
            return can_end(embedded(json.loads(grammar.text)))


def _rules_can_end(lark: str) -> bool:
    """Whether `start` has an end. Alternatives in a group count as those of its rule, so that a
    grammar that has an end is never taken for one that has none.
    """
    plain = _QUOTED.sub(
        lambda m: '""' if m[0][0] in '"/' and m[0][:2] != "//" else " ", _jsonless(lark)
    )
    heads = list(_RULE.finditer(plain))
    ends = [*(head.start() for head in heads[1:]), len(plain)]
    rules = {_NEVER: [{_NEVER}]}
    for head, end in zip(heads, ends, strict=True):
        body = plain[head.end() : end]
        for _ in range(GROUPS_MAX):
            body = _LEFT_OUT.sub(" ", body)
        rules[head[1]] = [set(re.findall(r"\w+", one)) for one in body.split("|")]
    finite = set[str]()
    for _ in range(PASSES_MAX):
        endless = rules.keys() - finite
        more = {name for name in endless if any(not one & endless for one in rules[name])}
        if not more:
            return "start" not in endless
        finite |= more
    return True


def _jsonless(lark: str) -> str:
    """The grammar with a word in place of each schema: a rule without an end, or text."""
    parts, at = list[str](), 0
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        if found.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError:
            continue
        parts += lark[at : found.start()], '""' if can_end(schema) else _NEVER
        at = end
    return "".join([*parts, lark[at:]])
