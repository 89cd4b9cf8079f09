"""Calls of tools in an answer: in which words a model makes them, and how they are read.

A model's chat template says which words it was trained on. They are read while the answer comes, so
that a client has the name at once and the arguments piece by piece; what looks like a call and is
none is text. Before: the answer's text, in pieces. After: whoever writes it in a protocol.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mesh.domain.checks import is_unicode
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.text import ToolFormat
from mesh.domain.values import dataclass
from mesh.text.schemas import embedded

CALLS_MAX = 16
"""The most calls in one answer that has to make some."""
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As models have seen calls: small ones else go on with blanks for ever."""


def format_of(chat_template: str | None) -> ToolFormat:
    """By the words in which the template tells of tools."""
    if chat_template is None or "tools" not in chat_template:
        return ToolFormat.NONE
    if "<tool_call>" in chat_template:
        return ToolFormat.HERMES
    if "python_tag" in chat_template or '"parameters"' in chat_template:
        return ToolFormat.LLAMA3
    return ToolFormat.NONE


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of a call: a piece of JSON."""

    index: int
    text: str


Said = Text | CallBegun | Arguments

_OPEN, _CLOSE, _PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
MARKS = frozenset({_OPEN, _CLOSE})
"""The marks around calls as Hermes makes them; they are tokens of their own, where the vocabulary
has such.
"""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The beginning of a call that has its name first, up to its arguments."""


class _Braces:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def end_in(self, text: str) -> int | None:
        """How much of this further text belongs to the object; None: all of it, and more."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None


class ToolReader:
    """One answer. Text is held back only while it may be the beginning of a call. `calls_alone`: it
    is nobody's words, and not told.
    """

    def __init__(self, form: ToolFormat, *, calls_alone: bool = False) -> None:
        self._form = form
        self._calls_alone = calls_alone
        self.calls = 0
        self._text = ""
        """Not told yet."""
        self._amid = form is ToolFormat.LLAMA3
        """Where a call may be, or is; else amid text."""
        self._braces: _Braces | None = None
        """The braces of the arguments that are being read."""
        self._done = False
        """The call is read, and its end awaited."""

    def push(self, text: str) -> list[Said]:
        """What is known by a further piece of the answer."""
        self._text += text
        return list(self._read(last=False))

    def finish(self) -> list[Said]:
        """What is left at the answer's end."""
        said = list(self._read(last=True))
        if self._text and not self._done and self._braces is None:
            torn = self._whole_call(self._text, closed=False) if self._amid else None
            said += self._plain(self._text) if torn is None else torn
        self._text = ""
        return said

    def _read(self, *, last: bool) -> Iterator[Said]:
        before = None
        while before != (before := (self._text, self._amid, self._braces, self._done)):
            if self._braces is not None:
                yield from self._arguments(self._braces)
            elif self._done:
                self._leave()
            elif self._amid:
                yield from self._call()
            else:
                yield from self._until_call(last=last)

    def _until_call(self, *, last: bool) -> Iterator[Said]:
        if self._form is ToolFormat.LLAMA3:
            yield from self._plain(self._take(len(self._text)))
            return
        at = self._text.find(_OPEN)
        if at >= 0:
            yield from self._plain(self._take(at).rstrip())
            self._take(len(_OPEN))
            self._amid = True
        elif not last:
            yield from self._plain(self._take(len(self._text) - _held(self._text)))

    def _call(self) -> Iterator[Said]:
        if self._form is ToolFormat.LLAMA3:
            begun = self._text.lstrip().removeprefix(_PYTHON).lstrip()
            if begun and not begun.startswith("{") and not _PYTHON.startswith(begun):
                self._amid = False
                return
            head = _HEAD.match(begun)
            if head:
                self._text = begun
        else:
            head = _HEAD.match(self._text)
        name = None if head is None else _name(head[1])
        if head is not None and name is not None:
            yield self._begin(name)
            self._take(head.end())
            self._braces = _Braces()
        elif self._form is ToolFormat.HERMES and _CLOSE in self._text:
            yield from self._whole_call(self._take(self._text.index(_CLOSE)))
            self._take(len(_CLOSE))
            self._amid = False

    def _arguments(self, braces: _Braces) -> Iterator[Said]:
        end = braces.end_in(self._text)
        piece = self._take(len(self._text) if end is None else end)
        if piece:
            yield Arguments(self.calls - 1, piece)
        if end is not None:
            self._braces, self._done = None, True

    def _leave(self) -> None:
        """Past what ends a call."""
        if self._form is ToolFormat.LLAMA3:
            rest = self._text.lstrip("}; \n\t,")
            if rest.startswith("{"):
                self._text, self._done = rest, False
            elif rest:
                self._text = ""
        elif _CLOSE in self._text:
            self._take(self._text.index(_CLOSE) + len(_CLOSE))
            self._done = self._amid = False

    def _whole_call(self, text: str, *, closed: bool = True) -> list[Said]:
        """What a whole call says when its parts come in another order, or when it is none."""
        try:
            said = json.loads(text.strip().removeprefix(_PYTHON))
            arguments = said.get("arguments", said.get("parameters", {}))
            name = said["name"]
        except (ValueError, AttributeError, KeyError, RecursionError):
            name = arguments = None
        if not isinstance(name, str) or not is_unicode(name) or not isinstance(arguments, dict):
            if self._form is ToolFormat.HERMES:
                text = f"{_OPEN}{text}{_CLOSE * closed}"
            return self._plain(text)
        begun = self._begin(name)
        written = json.dumps(arguments, ensure_ascii=False)
        if not is_unicode(written):
            written = json.dumps(arguments)
        return [begun, Arguments(begun.index, written)]

    def _begin(self, name: str) -> CallBegun:
        self.calls += 1
        return CallBegun(self.calls - 1, name)

    def _plain(self, text: str) -> list[Said]:
        """Blanks between calls are nobody's words."""
        between = self._calls_alone or (self.calls and text.isspace())
        return [Text(text)] if text and not between else []

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken


def _name(quoted: str) -> str | None:
    """The name of a tool, or `None` for what is no name: a torn escape, half a character."""
    try:
        name = json.loads(quoted)
    except ValueError:
        return None
    return name if isinstance(name, str) and is_unicode(name) else None


def _held(text: str) -> int:
    """Characters at the end that may be the beginning of a call, blanks before it included."""
    held = next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)
    kept = text[: len(text) - held]
    return held + len(kept) - len(kept.rstrip())


def calls_grammar(
    form: ToolFormat, schemas: Mapping[str, Any], *, several: bool, by_tokens: bool = False
) -> Grammar:
    """The grammar of an answer that calls one of these tools, or `several` of them. `schemas` has
    the schemas of their arguments by their names. `by_tokens`: `MARKS` are tokens, and not to be
    spelled.
    """
    key = "arguments" if form is ToolFormat.HERMES else "parameters"
    one_of = []
    for n, (name, schema) in enumerate(schemas.items()):
        call_at = "#" if len(schemas) == 1 else f"#/anyOf/{n}"
        own = embedded(schema, f"{call_at}/properties/{key}")
        one_of.append(_call_schema(key, name, own))
    schema = {**(one_of[0] if len(one_of) == 1 else {"anyOf": one_of}), "x-guidance": _BLANKS}
    call = f"%json {json.dumps(schema, ensure_ascii=False)}"
    if form is ToolFormat.HERMES:
        times = f'call ("\\n" call){{0,{CALLS_MAX - 1}}}' if several else "call"
        begin, end = (_OPEN, _CLOSE) if by_tokens else (f'"{_OPEN}"', f'"{_CLOSE}"')
        rules = ["start: " + times, f'call: {begin} "\\n" said "\\n" {end}', f"said: {call}"]
    else:
        rules = [f"start: {call}"]
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))


def _call_schema(key: str, name: str, schema: Any) -> dict[str, Any]:
    if "properties" in schema:
        # Arguments that a tool does not name are of no use to it.
        schema = {"additionalProperties": False, **schema}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }


def turn_of_calls(calls: Iterable[tuple[str, str, Mapping[str, Any] | str]]) -> str:
    """Calls that were made, by id, name and arguments, as templates take them: JSON. Arguments that
    are no object stay text.
    """
    return json.dumps(
        [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ]
    )


def with_objects(calls: Sequence[Any]) -> list[Any]:
    """The same turn of calls for a template that takes objects alone: text becomes what it says up
    to where it was cut.
    """
    return [
        {**call, "function": {**call["function"], "arguments": begun_object(arguments)}}
        if isinstance(arguments := _arguments_in(call), str)
        else call
        for call in calls
    ]


def _arguments_in(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def begun_object(text: str) -> dict[str, Any]:
    """An object of which this is the beginning; an empty one where it is that of none. The library
    is imported here alone: a command's start would have it, too.
    """
    from pydantic_core import from_json

    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
