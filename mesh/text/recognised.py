"""Which tokenizers and chat templates need no bounds, because what they are made of has none to
pass: their time and their output grow with the prompt alone.

A tenant's model brings both, and both are programs: a template may loop for hours, a pattern may
backtrack for minutes. What is recognised here runs within the controller, all else in a child
process that can be killed (`pool`). A part that is not known to be harmless counts as harmful.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from jinja2 import Environment, TemplateError, nodes

from mesh.domain.text import TextAssets

TOKENIZER_BYTES_MAX = 256 << 10
"""Building a larger tokenizer would keep the event loop for more than some 30 ms."""
TEMPLATE_CHARS_MAX = 4096
DECODED_GROWTH_MAX = 16
"""How many times longer a decoder may make a text."""
_KNOWN_TOKENIZERS = frozenset(
    {"c5b65482d8abd5ee37df53c07fb13f2fb300c9fb30ee4db48c97b29dda43c22a"}  # SmolLM2-135M-Instruct
)
"""SHA-256 of larger ones, which stop the loop once, when a controller builds them."""
ADDED_CHARS_MAX = 4096
"""In the texts of all added tokens: what keeps messages from forging them is made of these, in a
few microseconds a character.
"""
LITERAL_CHARS_MAX = 256
"""So much of a text a node tokenises in its compute thread."""
_WRITTEN_CHARS_MAX = 4
"""What one step of a normaliser may there write in the place of something."""
_RUNS_MAX, _OPTIONS_MAX = 2, 4
"""Quantifiers without and with a bound in one alternative of a pattern, there: its time grows with
the text's length cubed at most. Patterns of known families have no more.
"""
_ESCAPE = re.compile(r"\\[pPx]\{[^}]*\}|\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?[^\[\]]*\]")
_GROUP = re.compile(r"\(\?(?:i:|:|!|=)")
_RUN = re.compile(r"[*+][+?]?|\{\d+,\}")
_OPTION = re.compile(r"\?[+?]|\{\d?,?\d\}")
_STEPS_MAX = 8
_SPECIAL_IDS_MAX = 16
_PREPENDED_CHARS_MAX = 8
_NORMALIZERS = frozenset({"NFC", "Lowercase", "Prepend", "Replace"})
_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"}
)
_DECODERS = frozenset({"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Strip", "WordPiece"})
_LOOP_VALUES = frozenset({"first", "last", "index", "index0"})
_SCALARS = frozenset({"bos_token", "eos_token"})
_PARSER = Environment(trim_blocks=True, lstrip_blocks=True)


def is_harmless_tokenizer(tokenizer_json: bytes) -> bool:
    """Whether it may be built, and may encode short prompts, within the event loop's process."""
    if sha256(tokenizer_json).hexdigest() in _KNOWN_TOKENIZERS:
        return True
    if len(tokenizer_json) > TOKENIZER_BYTES_MAX:
        return False
    try:
        parts = json.loads(tokenizer_json)
        model = parts["model"]
        return (
            model.get("type", "BPE") in ("BPE", "WordLevel")
            and not model.get("dropout")
            and sum(len(one["content"]) for one in parts.get("added_tokens") or ())
            <= ADDED_CHARS_MAX
            and _are_harmless_normalizers(parts.get("normalizer"))
            and all(one["type"] in _PRE_TOKENIZERS for one in _steps(parts.get("pre_tokenizer")))
            and _is_harmless_post_processor(parts.get("post_processor"))
            and not decoder_fault(parts.get("decoder"))
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def decoder_fault(decoder: Any) -> str:
    """What keeps a tokenizer's decoder from running within a node, whose compute thread decodes
    each token; empty if nothing does. Raises TypeError, KeyError or AttributeError for what is no
    decoder.
    """
    growth = 1.0
    for step in _steps(decoder):
        pattern, content = "", " "
        match step["type"]:
            case "Replace":
                pattern, content = step["pattern"].get("String"), step["content"]
            case "BPEDecoder":
                pattern = step["suffix"]
            case "CTC":
                pattern = step["word_delimiter_token"]
            case kind if kind in _DECODERS:
                continue
            case kind:
                return f"its decoder has a step of the unknown type {kind!r}"
        if not pattern:
            return "its decoder replaces nothing, or what a regular expression finds"
        growth *= max(1.0, len(content) / len(pattern))
    if growth > DECODED_GROWTH_MAX:
        return (
            f"its decoder may make a text {growth:.0f} times longer, and {DECODED_GROWTH_MAX} "
            "times is the limit"
        )
    return ""


def is_quick_on_literals(tokenizer_json: bytes) -> bool:
    """Whether it encodes a text of up to LITERAL_CHARS_MAX, whatever that says, in a time that a
    node's compute thread can spare.
    """
    try:
        document = json.loads(tokenizer_json)
        normalizers = [*_parts(document.get("normalizer"))]
        written = [str(one.get("content", one.get("prepend", ""))) for one in normalizers]
        patterns = [
            str(one["Regex"])
            for one in (*normalizers, *_parts(document.get("pre_tokenizer")))
            if "Regex" in one
        ]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False
    return (
        sum(map(bool, written)) <= _WRITTEN_CHARS_MAX
        and all(len(one) <= _WRITTEN_CHARS_MAX for one in written)
        and all(map(is_quick_pattern, patterns))
    )


def is_quick_pattern(pattern: str) -> bool:
    """Whether a regular expression backtracks little: it refers to nothing that it has matched, no
    group is repeated or holds quantifiers, and each alternative has few of them.
    """
    bare = _ESCAPE.sub("c", pattern)
    while (fewer := _CLASS.sub("c", bare)) != bare:
        bare = fewer
    bare = _RUN.sub("*", _OPTION.sub("?", _GROUP.sub("(", bare)))
    refers = re.search(r"\\[1-9kgKRX]", pattern)
    if refers or re.search(r"[\[\]{}]|\)\*|[(*?][*?]", bare):
        return False
    runs = options = depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        runs, options = runs + (char == "*"), options + (char == "?")
        if runs > _RUNS_MAX or options > _OPTIONS_MAX or (depth and char in "*?"):
            return False
        if char == "|" and not depth:
            runs = options = 0
    return True


def _parts(part: Any) -> Iterator[Mapping[str, Any]]:
    """All objects within a part of a tokenizer, itself included."""
    if isinstance(part, dict):
        yield part
        part = [*part.values()]
    for inner in part if isinstance(part, list) else ():
        yield from _parts(inner)


def is_harmless_template(chat_template: str | None) -> bool:
    """Whether rendering takes time and gives text in proportion to the messages: one loop over the
    messages, no other, and nothing that is gathered, multiplied, called or filtered but trimmed.
    """
    if not chat_template:
        return True
    if len(chat_template) > TEMPLATE_CHARS_MAX:
        return False
    try:
        parsed = _PARSER.parse(chat_template)
    except (TemplateError, RecursionError):
        return False
    return all(_is_harmless(node, turn=None) for node in parsed.body)


def is_harmless(assets: TextAssets) -> bool:
    return is_harmless_template(assets.chat_template) and is_harmless_tokenizer(
        assets.tokenizer_json
    )


def _steps(part: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """What a part of a tokenizer does, one after the other. Raises TypeError for too many steps,
    and for sequences within sequences.
    """
    if part is None:
        return ()
    if part["type"] != "Sequence":
        return (part,)
    inner = next(
        (part[name] for name in ("normalizers", "pretokenizers", "decoders") if name in part), None
    )
    if not isinstance(inner, list) or len(inner) > _STEPS_MAX:
        raise TypeError(f"a sequence of more than {_STEPS_MAX} steps")
    if any(one["type"] == "Sequence" for one in inner):
        raise TypeError("a sequence within a sequence")
    return inner


def _are_harmless_normalizers(part: Mapping[str, Any] | None) -> bool:
    steps = _steps(part)
    kinds = [step["type"] for step in steps]
    return (
        _NORMALIZERS.issuperset(kinds)
        and len(set(kinds)) == len(kinds)
        and all(
            len(step.get("prepend", "")) <= _PREPENDED_CHARS_MAX
            and (
                step["type"] != "Replace"
                or (
                    bool(step["pattern"].get("String"))
                    and len(step["content"]) <= len(step["pattern"]["String"])
                )
            )
            for step in steps
        )
    )


def _is_harmless_post_processor(part: Mapping[str, Any] | None) -> bool:
    if part is None or part["type"] == "ByteLevel":
        return True
    if part["type"] != "TemplateProcessing":
        return False
    pieces = part["single"]
    texts = [piece for piece in pieces if "Sequence" in piece]
    ids = sum(len(token["ids"]) for token in part["special_tokens"].values())
    return len(texts) == 1 and len(pieces) <= _STEPS_MAX and ids <= _SPECIAL_IDS_MAX


def _is_harmless(node: nodes.Node, *, turn: str | None) -> bool:
    """A statement of a template; `turn` is the loop's variable within the loop."""
    match node:
        case nodes.Output():
            return all(
                isinstance(one, nodes.TemplateData) or _is_written(one, turn) for one in node.nodes
            )
        case nodes.If():
            branches = [*node.body, *node.elif_, *node.else_]
            return _is_cheap(node.test) and all(_is_harmless(one, turn=turn) for one in branches)
        case nodes.For():
            return (
                turn is None
                and isinstance(node.target, nodes.Name)
                and isinstance(node.iter, nodes.Name)
                and node.iter.name == "messages"
                and not node.recursive
                and not node.else_
                and (node.test is None or _is_cheap(node.test))
                and all(_is_harmless(one, turn=node.target.name) for one in node.body)
            )
    return False


def _is_written(node: nodes.Node, turn: str | None) -> bool:
    """An expression whose text goes into the prompt: constants and the turn's own words."""
    match node:
        case nodes.Const():
            return True
        case nodes.Name():
            return node.name in _SCALARS
        case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
            return _is_word(name, attr, turn)
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=attr)):
            return _is_word(name, attr, turn)
        case nodes.Add() | nodes.Concat():
            return all(_is_written(one, turn) for one in node.iter_child_nodes())
        case nodes.Filter(name="trim", node=nodes.Node() as trimmed):
            return not (node.args or node.kwargs) and _is_written(trimmed, turn)
        case nodes.Call(node=nodes.Name(name="raise_exception")):
            return all(_is_written(one, turn) for one in node.args) and not node.kwargs
    return False


def _is_word(name: str, attr: Any, turn: str | None) -> bool:
    if name == "loop":
        return attr in _LOOP_VALUES
    return turn is not None and name == turn and attr in ("role", "content", "name")


def _is_cheap(node: nodes.Node) -> bool:
    """A condition: comparisons of what there is, with nothing made anew."""
    allowed = (
        *(nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.Const, nodes.Name),
        *(nodes.Getattr, nodes.Getitem, nodes.Tuple, nodes.List),
    )
    if isinstance(node, nodes.Test):
        plain = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        return plain and node.name in ("defined", "none", "undefined") and _is_cheap(node.node)
    return isinstance(node, allowed) and all(map(_is_cheap, node.iter_child_nodes()))
