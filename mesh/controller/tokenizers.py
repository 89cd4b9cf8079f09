"""The tokenizers in use: built from a model's text assets when first needed, the latest used kept.

Building one takes a few hundred milliseconds and tokenising a long prompt tens of them, so both run
on a thread: the loop goes on relaying tokens meanwhile. Short prompts are tokenised in place, which
is quicker than going to a thread and back.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from mesh.domain.errors import InvalidInput, MeshError, StorageError
from mesh.domain.ids import ModelId
from mesh.domain.invocation import ChatPrompt, TextPrompt
from mesh.domain.text import ChatMessage, SamplingDefaults, TextAssets, ToolFormat
from mesh.text.thoughts import Thinking

CODECS_MAX = 32
"""Of 10 to 100 MB each, by the size of the vocabulary."""
INLINE_CHARS_MAX = 2_000
"""About a millisecond of tokenising."""


class PromptCodec(Protocol):
    """A model's tokenizer, chat template and recommended sampling, and how it calls tools."""

    sampling: SamplingDefaults
    tool_format: ToolFormat
    calls_by_tokens: bool
    last_mark_id: int

    def encode(self, text: str) -> Sequence[int]: ...

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        template_kwargs: str,
        tools: str,
        *,
        special_tokens_in_content: bool,
    ) -> Sequence[int]: ...

    def may_forge(
        self, messages: Sequence[ChatMessage], template_kwargs: str, tools: str
    ) -> bool: ...

    def thinking(self, template_kwargs: str) -> Thinking | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def chars_of(prompt: TextPrompt | ChatPrompt) -> int:
    """How much there is to render and tokenise."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    said = sum(
        len(m.role) + len(m.content) + len(m.reasoning_content) + len(m.tool_calls)
        for m in prompt.messages
    )
    return said + len(prompt.tools) + len(prompt.template_kwargs)


class Tokenizers:
    """`find` gives a model's assets from the registry, `build` makes a codec of them."""

    def __init__(
        self,
        *,
        find: Callable[[ModelId], TextAssets | None],
        build: Callable[[TextAssets], PromptCodec],
        codecs_max: int = CODECS_MAX,
    ) -> None:
        self._find = find
        self._build = build
        self._codecs_max = codecs_max
        self._building: OrderedDict[ModelId, asyncio.Task[PromptCodec]] = OrderedDict()

    async def tokens(
        self,
        model_id: ModelId,
        prompt: TextPrompt | ChatPrompt,
        *,
        special_tokens_in_content: bool = False,
    ) -> tuple[int, ...]:
        """The prompt's tokens; those of a chat as `TextCodec.encode_chat` has it. Raises
        InvalidInput where the chat template does, or for none.
        """
        codec = await self._codec(model_id)
        inline = chars_of(prompt) <= INLINE_CHARS_MAX
        match prompt:
            case TextPrompt(text=text):
                encode = partial(codec.encode, text)
            case ChatPrompt(messages=messages, template_kwargs=kwargs, tools=tools):
                encode = partial(
                    codec.encode_chat,
                    messages,
                    kwargs,
                    tools,
                    special_tokens_in_content=special_tokens_in_content,
                )
                inline = inline and not codec.may_forge(messages, kwargs, tools)
        tokens = tuple(encode() if inline else await asyncio.to_thread(encode))
        if not tokens:
            raise InvalidInput("the prompt comes to no tokens", hint="give it some text")
        return tokens

    async def sampling_defaults(self, model_id: ModelId) -> SamplingDefaults:
        return (await self._codec(model_id)).sampling

    async def tool_format(self, model_id: ModelId) -> ToolFormat:
        """How the model calls tools, as its chat template tells."""
        return (await self._codec(model_id)).tool_format

    async def calls_by_tokens(self, model_id: ModelId, vocabulary_tokens: int) -> bool:
        """Whether the model has tokens for the marks of its calls, and can give them out: a
        tokenizer may know more tokens than the model.
        """
        codec = await self._codec(model_id)
        return codec.calls_by_tokens and codec.last_mark_id < vocabulary_tokens

    async def thinking(
        self, model_id: ModelId, template_kwargs: str, vocabulary_tokens: int
    ) -> Thinking | None:
        """How its answers to chats begin; None: with no thought."""
        codec = await self._codec(model_id)
        if len(template_kwargs) <= INLINE_CHARS_MAX:
            thinking = codec.thinking(template_kwargs)
        else:
            thinking = await asyncio.to_thread(codec.thinking, template_kwargs)
        if thinking is None or codec.last_mark_id < vocabulary_tokens:
            return thinking
        return replace(thinking, by_tokens=False)

    async def token_bytes(self, model_id: ModelId) -> Callable[[int], bytes]:
        """What each token of the model adds to a text."""
        return (await self._codec(model_id)).token_bytes

    def warm(self, model_id: ModelId) -> None:
        """Begin to build a codec that will be needed; whoever needs it sees its failure."""
        if model_id not in self._building and len(self._building) < self._codecs_max:
            self._start(model_id)

    async def close(self) -> None:
        """Wait for builds under way: a thread cannot be stopped."""
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        self._building.clear()

    async def _codec(self, model_id: ModelId) -> PromptCodec:
        task = self._building.get(model_id) or self._start(model_id)
        self._building.move_to_end(model_id)
        if task.done() and task.exception() is None:
            return task.result()
        try:
            return await asyncio.shield(task)
        except MeshError:
            self._building.pop(model_id, None)
            raise

    def _start(self, model_id: ModelId) -> "asyncio.Task[PromptCodec]":
        task = asyncio.ensure_future(self._built(model_id))
        # Failures are told to those who wait; nobody may wait for one that was only warmed.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._building[model_id] = task
        while len(self._building) > self._codecs_max:
            self._building.popitem(last=False)
        return task

    async def _built(self, model_id: ModelId) -> PromptCodec:
        assets = self._find(model_id)
        if assets is None:
            raise StorageError(
                f"the registry holds no tokenizer of model {model_id}",
                hint="delete its deployment and deploy it again",
            )
        return await asyncio.to_thread(self._build, assets)
