"""Tokenizers are built once each, beside the loop, and only so many are kept."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from mesh.controller.tokenizers import INLINE_CHARS_MAX, Tokenizers
from mesh.domain.errors import InvalidInput, StorageError, TornModel
from mesh.domain.ids import ModelId
from mesh.domain.invocation import ChatPrompt, TextPrompt
from mesh.domain.text import ChatMessage, SamplingDefaults, TextAssets, ToolFormat
from mesh.text.thoughts import Thinking

ONE, TWO, THREE = ModelId("one"), ModelId("two"), ModelId("three")
HI = TextPrompt(text="hi")


class Codec:
    """One token a character; notes which thread tokenised."""

    threads: list[int]

    def __init__(self) -> None:
        self.threads = []
        self.sampling = SamplingDefaults()
        self.tool_format = ToolFormat.NONE
        self.calls_by_tokens = True
        self.last_mark_id = 7

    def encode(self, text: str) -> Sequence[int]:
        self.threads.append(threading.get_ident())
        return [ord(char) for char in text]

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        template_kwargs: str,
        tools: str,
        *,
        special_tokens_in_content: bool,
    ) -> Sequence[int]:
        return self.encode("".join(message.content for message in messages))

    def may_forge(self, messages: Sequence[ChatMessage], template_kwargs: str, tools: str) -> bool:
        return any("<" in message.content for message in messages)

    def thinking(self, template_kwargs: str) -> Thinking | None:
        self.threads.append(threading.get_ident())
        return Thinking(amid=False, by_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class Shelf:
    """Builds codecs, and counts how often."""

    def __init__(self, *known: ModelId) -> None:
        self.built: list[bytes] = []
        self.codec = Codec()
        self.fail = False
        self.tokenizers = Tokenizers(
            find=lambda model: (
                TextAssets(tokenizer_json=model.encode()) if model in known else None
            ),
            build=self._build,
            codecs_max=2,
        )

    def _build(self, assets: TextAssets) -> Codec:
        if self.fail:
            raise TornModel("torn")
        self.built.append(assets.tokenizer_json)
        return self.codec


async def test_a_codec_is_built_once_for_all_who_wait() -> None:
    shelf = Shelf(ONE)
    answers = await asyncio.gather(*(shelf.tokenizers.tokens(ONE, HI) for _ in range(5)))
    assert answers == [(104, 105)] * 5
    assert shelf.built == [b"one"]


async def test_the_least_used_codec_goes_first() -> None:
    shelf = Shelf(ONE, TWO, THREE)
    for model in (ONE, TWO, ONE, THREE, ONE, TWO):
        await shelf.tokenizers.tokens(model, HI)
    assert shelf.built == [b"one", b"two", b"three", b"two"]


async def test_a_failed_build_is_told_and_tried_again() -> None:
    shelf = Shelf(ONE)
    shelf.fail = True
    for _ in range(2):
        with pytest.raises(TornModel):
            await shelf.tokenizers.tokens(ONE, HI)
    shelf.fail = False
    assert await shelf.tokenizers.tokens(ONE, HI) == (104, 105)
    with pytest.raises(StorageError, match="no tokenizer of model two"):
        await shelf.tokenizers.tokens(TWO, HI)


async def test_warming_builds_ahead_and_hides_no_failure() -> None:
    shelf = Shelf(ONE)
    for model in (ONE, TWO):
        shelf.tokenizers.warm(model)
    await shelf.tokenizers.close()
    assert shelf.built == [b"one"]


async def test_long_prompts_are_tokenised_on_a_thread_and_short_ones_in_place() -> None:
    shelf = Shelf(ONE)
    here = threading.get_ident()
    await shelf.tokenizers.tokens(ONE, HI)
    long = ChatMessage(role="user", content="x" * (INLINE_CHARS_MAX + 1))
    await shelf.tokenizers.tokens(ONE, ChatPrompt(messages=(long,)))
    assert shelf.codec.threads[0] == here
    assert shelf.codec.threads[1] != here


async def test_so_is_what_a_template_is_given_besides() -> None:
    """The template renders it, whatever the messages are."""
    shelf, here, hi = Shelf(ONE), threading.get_ident(), ChatMessage(role="user", content="hi")
    long = f'{{"documents": "{"x" * INLINE_CHARS_MAX}"}}'
    await shelf.tokenizers.thinking(ONE, "", 8)
    await shelf.tokenizers.thinking(ONE, long, 8)
    await shelf.tokenizers.tokens(ONE, ChatPrompt(messages=(hi,), template_kwargs=long))
    mark = ChatMessage(role="user", content="<")
    await shelf.tokenizers.tokens(ONE, ChatPrompt(messages=(mark,)))
    assert [thread == here for thread in shelf.codec.threads] == [True, False, False, False]


async def test_marks_that_the_model_cannot_give_out_are_none() -> None:
    """The tokenizer's last one is 7."""
    shelf = Shelf(ONE)
    for vocabulary_tokens, known in ((8, True), (7, False)):
        assert await shelf.tokenizers.calls_by_tokens(ONE, vocabulary_tokens) is known
        thinking = await shelf.tokenizers.thinking(ONE, "", vocabulary_tokens)
        assert thinking == Thinking(amid=False, by_tokens=known)


async def test_a_prompt_without_tokens_is_invalid() -> None:
    with pytest.raises(InvalidInput, match="comes to no tokens"):
        await Shelf(ONE).tokenizers.tokens(ONE, TextPrompt(text=""))
