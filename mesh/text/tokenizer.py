"""A model's text codec: encodes prompts and conversations, decodes tokens.

The gateway encodes with it, since admission needs a prompt's length; nodes decode with it. It is
built from `TextAssets` alone, so both sides agree. Safe to use from several threads.
"""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mesh.domain.errors import InvalidInput, MeshError, ModelError, TornModel
from mesh.domain.text import ChatMessage, TextAssets
from mesh.domain.values import replace
from mesh.text import thoughts
from mesh.text.content_guard import ContentGuard, Conversation
from mesh.text.thoughts import Thinking
from mesh.text.tool_calls import MARKS, format_of

if TYPE_CHECKING:
    from mesh.text.template import ChatTemplate

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte that has no token of its own, in vocabularies of SentencePiece."""


_KWARGS_MAX = 64
"""For so many keyword arguments of templates, it is kept how answers begin."""
_KWARGS_CHARS_MAX = 1024
"""Longer ones are looked at anew: callers say what they hold."""

_FILLS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Tokens before a text, between it and its end, and after that, where a model fills in: those of
Qwen and CodeGemma, StarCoder and Granite, DeepSeek.
"""


def _byte_chars() -> dict[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for, as GPT-2 has them: what
    prints stands for itself, the others for what follows U+0100.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTES = _byte_chars()


class TextCodec:
    """Raises TornModel when the tokenizer cannot be read."""

    def __init__(self, assets: TextAssets) -> None:
        self._tokenizer = _built(assets.tokenizer_json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that are no text: where turns begin and end, and the like."""
        decoder = self._tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._bos_id = self._tokenizer.token_to_id(assets.bos_token) if assets.bos_token else None
        self._add_bos = assets.add_bos and self._bos_id is not None
        self._assets = replace(assets, tokenizer_json=b"")
        self._compiled: dict[str, ChatTemplate | MeshError] = {}
        """By their text. They are compiled when a chat needs them: nodes render none."""
        self.sampling = assets.sampling
        self.tool_format = format_of(assets.tool_template or assets.chat_template)
        self.calls_by_tokens = {one.content for one in added.values() if not one.special} >= MARKS
        """Calls begin and end with tokens of their own, which are text all the same."""
        templates = [one for one in (assets.chat_template, assets.tool_template) if one]
        marks = {thoughts.OPEN, thoughts.CLOSE, *MARKS}
        self.last_mark_id = max((i for i, one in added.items() if one.content in marks), default=-1)
        """The largest id of a token that marks calls or thoughts; -1 where there is none."""
        self.thinks = any(thoughts.CLOSE in one for one in templates)
        """Its answers may begin with a thought."""
        self._has_marks = {thoughts.OPEN, thoughts.CLOSE} <= {one.content for one in added.values()}
        self._known_thinking = lru_cache(maxsize=_KWARGS_MAX)(self._thinking)

    @property
    def vocabulary_tokens(self) -> int:
        """Token ids are below this."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt that is continued as it is, with the model's own beginning.

        Raises InvalidInput for text that is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_pair(self, query: str, document: str) -> tuple[int, ...]:
        """Token ids of a query and a document, with what the tokenizer puts around and between.
        Raises as `encode` does, and InvalidInput for a query that contains the separator of both:
        nobody could tell where it ends.
        """
        ids = self._encode((query, document), add_special_tokens=True)
        if ids and ids[-1] in self.special_ids and ids[-1] in self.encode_part(query):
            separator = self._tokenizer.id_to_token(ids[-1])
            raise InvalidInput(
                f"the query contains {separator!r}, which separates a query from its document",
                hint="leave it out",
                field="query",
            )
        return ids

    def encode_fill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        """Token ids of a prompt that the model fills in the middle of, by the tokens that it has
        for that. Raises as `encode` does, and InvalidInput where it has none.
        """
        known = self._tokenizer.token_to_id
        marks = next((of for of in _FILLS if all(known(mark) is not None for mark in of)), None)
        if marks is None:
            raise InvalidInput(
                "suffix is not supported by this model: its tokenizer has no tokens for filling in",
                hint="leave it out, or ask a model that has them, such as Qwen2.5-Coder",
                field="suffix",
            )
        before, between, after = marks
        return self.encode(f"{before}{prefix}{between}{suffix}{after}")

    def encode_part(self, text: str) -> tuple[int, ...]:
        """Token ids of text in the midst of a prompt: nothing is added at its beginning or end."""
        return self._encode(text, add_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        template_kwargs: str = "",
        tools: str = "",
        special_tokens_in_content: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, rendered by the model's template, ready for the answer.

        Special tokens are those that the template writes; texts of such in what a client sends are
        characters like others, unless `special_tokens_in_content`.
        """
        conversation = Conversation(messages, template_kwargs, tools)
        token_ids = self._encode(self.render_chat(*conversation), add_special_tokens=False)
        if special_tokens_in_content or not self._guard.suspects(conversation):
            return token_ids
        return tuple(self._guard.encode(conversation, self.render_chat, token_ids))

    def render_chat(
        self, messages: Sequence[ChatMessage], template_kwargs: str = "", tools: str = ""
    ) -> str:
        """The prompt text of a conversation; `template_kwargs`, `tools`: see ChatPrompt.

        Raises InvalidInput when the model has no template, its template cannot be compiled, or the
        template refuses the messages.
        """
        assets = self._assets
        named = assets.tool_template if tools and assets.tool_template else assets.chat_template
        if not named:
            other = " for chats without tools" if assets.tool_template else ""
            raise InvalidInput(
                f"the model has no chat template{other}", hint="send a plain prompt (`--raw`)"
            )
        return self._template(named).render(messages, template_kwargs, tools)

    def _template(self, named: str) -> "ChatTemplate":
        """Raises InvalidInput for one that cannot be compiled: other prompts do without."""
        known = self._compiled.get(named)
        if known is None:
            from mesh.text.template import ChatTemplate  # Jinja takes 30 ms of CPU

            try:
                known = ChatTemplate(named, self._assets)
            except MeshError as error:
                known = error
            self._compiled[named] = known
        if isinstance(known, MeshError):
            raise InvalidInput(known.message, hint=known.hint, field="messages")
        return known

    def template_fault(self) -> str:
        """Why a chat template cannot be compiled; empty where all can, or there is none."""
        for named in filter(None, (self._assets.chat_template, self._assets.tool_template)):
            try:
                self._template(named)
            except InvalidInput as error:
                return error.message
        return ""

    def known(self) -> dict[str, Any]:
        """What a controller keeps of it, as JSON has it."""
        thinking = self.thinking("")
        return {
            "template_fault": self.template_fault(),
            "tool_format": self.tool_format,
            "calls_by_tokens": self.calls_by_tokens,
            "last_mark_id": self.last_mark_id,
            "thinks": self.thinks,
            "thinking": None if thinking is None else [thinking.amid, thinking.by_tokens],
        }

    def may_forge(
        self, messages: Sequence[ChatMessage], template_kwargs: str = "", tools: str = ""
    ) -> bool:
        """Whether the conversation has to be looked at for special tokens, which may take long."""
        return self._guard.suspects(Conversation(messages, template_kwargs, tools))

    @cached_property
    def _guard(self) -> ContentGuard:
        """Nodes, which encode no chats, do without."""
        templates = (self._assets.chat_template, self._assets.tool_template)
        return ContentGuard(self._tokenizer, [one for one in templates if one])

    def thinking(self, template_kwargs: str) -> Thinking | None:
        """How answers begin to chats with these; None: with no thought."""
        if not self.thinks:
            return None
        short = len(template_kwargs) <= _KWARGS_CHARS_MAX
        return (self._known_thinking if short else self._thinking)(template_kwargs)

    def _thinking(self, template_kwargs: str) -> Thinking | None:
        try:
            prompt = self.render_chat([ChatMessage(role="user", content="?")], template_kwargs)
        except InvalidInput:
            return None  # whoever asks with these is told why
        return thoughts.thinking_after(prompt, by_tokens=self._has_marks)

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of the tokens, with special ones by their names or without them. Incomplete
        characters become U+FFFD.

        Raises ModelError where the tokenizer's decoder fails.
        """
        try:
            skipped = not special_tokens
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=skipped))
        except BaseException as error:
            _raise_unless_of_library(error)
            raise ModelError(f"the tokenizer cannot decode tokens: {error}") from None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, if need be a part of a character; of a special one its name,
        and nothing of one that the vocabulary does not have. A token of a byte-level vocabulary
        that is not spelled in its alphabet stands for itself, as for the library's decoder.
        """
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id not in self._added_ids:
            if self._byte_level and all(char in _BYTES for char in token):
                return bytes(_BYTES[char] for char in token)
            if byte := _BYTE.fullmatch(token):
                return bytes([int(byte[1], 16)])
        return str(token).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def _encode(self, text: str | tuple[str, str], *, add_special_tokens: bool) -> tuple[int, ...]:
        texts = (text,) if isinstance(text, str) else text
        try:
            for one in texts:
                one.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"the prompt is not valid Unicode at character {error.start}",
                hint="lone surrogates cannot be encoded as UTF-8",
            ) from error
        try:
            pair = texts[1] if len(texts) > 1 else None
            ids = self._tokenizer.encode(texts[0], pair, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            _raise_unless_of_library(error)
            raise InvalidInput(
                f"the model's tokenizer fails on this text: {error}",
                hint="its tokenizer.json is at fault; a shorter text may do",
            ) from None
        missing_bos = add_special_tokens and self._add_bos and ids[:1] != [self._bos_id]
        return (self._bos_id, *ids) if missing_bos and self._bos_id is not None else tuple(ids)


def _raise_unless_of_library(error: BaseException) -> None:
    """Raise on what is neither an exception nor a panic of the library's, which is a BaseException
    of a class that cannot be imported.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    if isinstance(error, MemoryError):
        raise error


def _built(tokenizer_json: bytes) -> Tokenizer:
    """Raises TornModel."""
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except BaseException as error:
        # The library raises bare exceptions, and panics with what is not even one; whatever it
        # says, the file is not a tokenizer.
        _raise_unless_of_library(error)
        raise TornModel(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
