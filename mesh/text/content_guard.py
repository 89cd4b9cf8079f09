"""Keeps the content of messages from forging turns: what a client writes is encoded as text.

A rendered prompt no longer says which of its characters a client wrote. So a conversation whose
strings hold any character that marks are made of is rendered a second time with these characters
replaced by private ones: marks that are still there were written by the template. Where the two
prompts hold the same marks nothing was forged, and the first is taken as it is. Otherwise the
second one is encoded by a tokenizer in which marks have names that no client can know, so that
their plain texts are characters like others. Before: `template`. After: token ids.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from mesh.domain.errors import InvalidInput
from mesh.domain.text import ChatMessage
from mesh.domain.values import replace
from mesh.text.thoughts import CLOSE, OPEN
from mesh.text.tool_calls import MARKS

_IN_CONTENT = frozenset({OPEN, CLOSE, *MARKS, "<tool_response>", "</tool_response>"})
"""Marks that templates look for in an assistant's earlier answers, or that callers who run tools by
themselves write. They divide an answer, and begin or end no turn.
"""
_TURN_LIKE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_PRIVATE = range(0xF0000, 0x10FFF0)
"""Private characters of Unicode's planes 15 and 16, less those at the end."""
_IN_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_QUOTE = "\U0010fffd"
"""Around the private name of a mark, which also holds a secret: nobody can write one."""
_PREFIX_CHARS = 3
"""Marks that begin alike are tried together: vocabularies have thousands, most of them unused."""


class Conversation(NamedTuple):
    """What a template renders; the last two are JSON, or empty."""

    messages: Sequence[ChatMessage]
    template_kwargs: str = ""
    tools: str = ""

    def strings(self) -> Iterator[str]:
        """All that a client wrote."""
        yield from (self.template_kwargs, self.tools)
        for one in self.messages:
            yield from (one.role, one.content, one.name, one.reasoning_content)
            yield from (one.tool_call_id, one.tool_calls)

    def mapped(self, change: Callable[[str], str]) -> "Conversation":
        """The same with every string changed, those within JSON and its keys included."""

        def within(text: str) -> str:
            try:
                return json.dumps(_mapped(json.loads(text), change)) if text else ""
            except RecursionError as error:
                raise InvalidInput("the tools, calls or kwargs nest too deeply") from error

        messages = [
            replace(
                one,
                role=change(one.role),
                content=change(one.content),
                name=change(one.name),
                reasoning_content=change(one.reasoning_content),
                tool_call_id=change(one.tool_call_id),
                tool_calls=within(one.tool_calls),
            )
            for one in self.messages
        ]
        return Conversation(messages, within(self.template_kwargs), within(self.tools))


class ContentGuard:
    """Guards the content of messages for one tokenizer and its templates."""

    def __init__(self, tokenizer: Tokenizer, templates: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._written = "\n".join(templates)
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: token_id for token_id, token in added.items() if self._guards(token)
        }
        self.ids = frozenset(self._ids.values())
        """The ids of the marks, which only a template may write."""
        self._apart = sorted({char for mark in self._ids for char in _telling(mark)})
        self._marks = _any_of(self._ids)
        self._suspect = _one_of(self._apart)
        self._normalizer = tokenizer.normalizer if self._apart else None
        # What it makes of any words, as ▁ of each space, forges nothing.
        self._normal_suspect = _one_of(set(self._apart) - set(self._normal("a a")))
        kept = "|".join(map(re.escape, sorted(_IN_CONTENT, reverse=True)))
        self._kept = re.compile(kept)
        self._swapped = re.compile(f"{kept}|{self._suspect.pattern}")
        self._secret = secrets.token_hex(8)
        self._plain: Tokenizer | None = None

    def suspects(self, conversation: Conversation) -> bool:
        """Whether a client wrote any character that marks are made of, or one that the tokenizer's
        normaliser makes into such, as NFKC does with a full-width `<`. An escape in JSON may be
        one.
        """
        return any(
            self._suspect.search(text)
            or r"\u" in text
            or self._normal_suspect.search(self._normal(text))
            for text in conversation.strings()
        )

    def _normal(self, text: str) -> str:
        if self._normalizer is None:
            return ""
        return str(self._normalizer.normalize_str(text.encode(errors="replace").decode()))

    def encode(
        self, conversation: Conversation, render: Callable[..., str], token_ids: Sequence[int]
    ) -> Sequence[int]:
        """The token ids of a suspected conversation, which whole and unguarded has `token_ids`.

        Raises InvalidInput where the template refuses it.
        """
        found = [token_id for token_id in token_ids if token_id in self.ids]
        if not found:
            return token_ids
        bank = self._bank(conversation)
        to = dict(zip(self._apart, map(chr, bank), strict=True))
        private = {ord(char): to[char] for char in self._apart}

        def hide(text: str) -> str:
            if self._kept.search(text) is None:
                return text.translate(private)
            return self._swapped.sub(lambda found: to.get(found[0], found[0]), text)

        prompt = render(*conversation.mapped(hide))
        if [self._ids[mark] for mark in self._marks.findall(prompt)] == found:
            return token_ids
        named = self._marks.sub(lambda m: self._name(self._ids[m[0]]), prompt)
        back = {ord(private): char for char, private in to.items()}
        if self._plain is None:
            self._plain = Tokenizer.from_str(self._renamed())
        ids: list[int] = self._plain.encode(named.translate(back), add_special_tokens=False).ids
        return ids

    def _guards(self, token: AddedToken) -> bool:
        """Special tokens, and others that mark turns: by their look, or as templates write them."""
        mark = token.content
        if mark in _IN_CONTENT or not mark or mark.isspace():
            return False
        telling = not mark.isalnum() and any(char.isalnum() for char in mark)
        turns = _TURN_LIKE.fullmatch(mark) or (telling and mark in self._written)
        return bool(token.special or turns)

    def _bank(self, conversation: Conversation) -> range:
        """As many private characters as there are to be replaced, none of which a client wrote."""
        used: set[str] = set()

        def note(text: str) -> str:
            used.update(_IN_PRIVATE.findall(text))
            return text

        conversation.mapped(note)
        for start in range(_PRIVATE.start, _PRIVATE.stop, len(self._apart)):
            bank = range(start, start + len(self._apart))
            if bank.stop <= _PRIVATE.stop and used.isdisjoint(map(chr, bank)):
                return bank
        raise InvalidInput(
            f"the messages hold {len(used)} characters of Unicode's private planes, and the text "
            "of a special token",
            hint="leave out one or the other",
            field="messages",
        )

    def _name(self, token_id: int) -> str:
        return f"{_QUOTE}{self._secret}{token_id}{_QUOTE}"

    def _renamed(self) -> str:
        """The tokenizer with private names for all marks: also in its vocabulary, where a model
        may else come upon them by merging characters.
        """
        document = json.loads(self._tokenizer.to_str())
        names = {mark: self._name(token_id) for mark, token_id in self._ids.items()}
        for token in document["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "single_word": False}
                token["normalized"] = False
        model = document["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            # Where two texts have one id, the library's JSON has one of them.
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
            model["vocab"] = {names.get(text, text): n for text, n in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if "merges" in model:
            pairs = [one if isinstance(one, list) else one.split(" ") for one in model["merges"]]
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        return json.dumps(document, ensure_ascii=False)


def _telling(mark: str) -> set[str]:
    """The characters of a mark that words have not; of one without such, its first."""
    return set(re.findall(r"[^\w\s]", mark)) or {mark[0]}


def _one_of(chars: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(chars))) or "(?!)")


def _any_of(marks: Iterable[str]) -> re.Pattern[str]:
    """Longer ones go before those that they begin with."""
    groups = groupby(sorted(marks, reverse=True), lambda mark: mark[:_PREFIX_CHARS])
    parts = (
        re.escape(begins) + "(?:" + "|".join(re.escape(one[len(begins) :]) for one in ones) + ")"
        for begins, ones in groups
    )
    return re.compile("|".join(parts) or "(?!)")


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case list():
            return [_mapped(one, change) for one in value]
        case dict():
            return {change(key): _mapped(one, change) for key, one in value.items()}
        case _:
            return value
