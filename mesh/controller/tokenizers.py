"""The tokenizers in use: built from a model's text assets when first needed, the latest used kept.

What is recognised as harmless (`mesh.text.recognised`) tokenises short prompts in place, which is
quicker than going elsewhere and back. All else that tenants bring runs in the child processes of
`mesh.text.pool`, and so do long prompts and grammars: nothing of it can hold up the event loop.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import partial
from hashlib import sha256
from typing import Any

from mesh.domain.errors import InvalidInput, MeshError, ModelError, StorageError
from mesh.domain.grammar import Grammar
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.invocation import ChatPrompt, FillPrompt, PairPrompt, TextPrompt
from mesh.domain.limits import forget_oldest
from mesh.domain.text import SamplingDefaults, TextAssets, ToolFormat
from mesh.domain.values import dataclass, replace
from mesh.text.pool import Owner, TextPool, codec_key
from mesh.text.thoughts import Thinking
from mesh.text.tokenizer import TextCodec
from mesh.wire.access import caller

CODECS_MAX = 32
"""This many tokenizers are kept; each takes 10 to 100 MB, by the size of the vocabulary."""
FAULT_S_MAX = 5.0
"""A deploy waits this long for the trial of its texts; after that the log alone tells of it."""
FAILED_S = 60.0
"""For so long a model is refused that has failed its trial; then it is tried again."""
INLINE_CHARS_MAX = 2_000
"""About a millisecond of tokenising."""
INLINE_TOKENS_MAX = 64
"""So many are decoded in a few milliseconds, of the longest tokens that there may be, too."""
CHARS_PER_TOKEN = 32
"""For the limits of decoding: several times the mean of any vocabulary."""
TURN_CHARS = 32
"""What a template puts around a turn, in the mean."""
THINKINGS_MAX = 64
"""For so many template_kwargs of one model, it is kept how answers begin."""
THINKING_CHARS_MAX = 1024
"""Longer ones are looked at anew: callers say what they hold."""
GRAMMARS_MAX = 1024
"""Grammars that are known to be good."""

logger = logging.getLogger(__name__)


def chars_of(prompt: TextPrompt | ChatPrompt | PairPrompt | FillPrompt) -> int:
    """How much there is to render and tokenise."""
    if isinstance(prompt, PairPrompt):
        return len(prompt.query) + len(prompt.document)
    if isinstance(prompt, FillPrompt):
        return len(prompt.prefix) + len(prompt.suffix)
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    said = sum(
        len(m.role) + len(m.content) + len(m.reasoning_content) + len(m.tool_calls)
        for m in prompt.messages
    )
    return said + len(prompt.tools) + len(prompt.template_kwargs)


@dataclass(eq=False, slots=True, kw_only=True)
class _Texts:
    """What is known of one model's texts."""

    name: ModelId
    key: bytes
    tokenizer_bytes: int
    sampling: SamplingDefaults
    codec: TextCodec | None
    """Where its tokenizer is harmless; it renders chats only if `renders`."""
    renders: bool
    tool_format: ToolFormat
    calls_by_tokens: bool
    last_mark_id: int
    """The largest id of a token that marks calls or thoughts; -1 where there is none."""
    thinks: bool
    template_fault: str = ""
    """Why its chats are refused, where its chat template cannot be compiled."""
    thinking: OrderedDict[str, Thinking | None] = field(default_factory=OrderedDict)
    """How answers begin, by template_kwargs."""
    vocabulary: list[bytes] | None = None
    """What each token adds to a text, where there is no codec, once somebody has asked."""

    @property
    def owner(self) -> Owner:
        return Owner(
            tenant=caller().tenant,
            name=self.name,
            key=self.key,
            tokenizer_bytes=self.tokenizer_bytes,
        )


class Tokenizers:
    """`find` gives a model's assets from the registry. For one event loop."""

    def __init__(
        self,
        *,
        find: Callable[[ModelId], TextAssets | None],
        pool: TextPool,
        codecs_max: int = CODECS_MAX,
    ) -> None:
        self._find = find
        self._pool = pool
        self._codecs_max = codecs_max
        self._building: OrderedDict[ModelId, asyncio.Task[_Texts]] = OrderedDict()
        self._failed: OrderedDict[ModelId, tuple[float, ModelError]] = OrderedDict()
        """Models whose last trial failed: until when none is made again, and why it did."""
        self._grammars: OrderedDict[Grammar, None] = OrderedDict()
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="tokenizers")

    async def tokens(
        self,
        model_id: ModelId,
        prompt: TextPrompt | ChatPrompt | PairPrompt | FillPrompt,
        *,
        special_tokens_in_content: bool = False,
        is_part: bool = False,
    ) -> tuple[int, ...]:
        """The prompt's tokens; those of a chat as `TextCodec.encode_chat` has it, those of a text
        with the model's own beginning unless `is_part`. Raises InvalidInput where the chat template
        does, or for none; Refused where it has to wait for too long, or the model is on hold.
        """
        texts = await self._texts(model_id)
        chars = chars_of(prompt)
        tokens: Any
        match prompt:
            case TextPrompt(text=text):
                method = "encode_part" if is_part else "encode"
                if texts.codec is not None and chars <= INLINE_CHARS_MAX:
                    tokens = getattr(texts.codec, method)(text)
                else:
                    tokens = await self._called(texts, method, text, chars=chars)
            case FillPrompt(prefix=prefix, suffix=suffix):
                tokens = await self._called(texts, "encode_fill", prefix, suffix, chars=chars)
            case PairPrompt(query=query, document=document):
                tokens = await self._called(texts, "encode_pair", query, document, chars=chars)
            case ChatPrompt(messages=messages, template_kwargs=kwargs, tools=tools):
                short = chars + TURN_CHARS * len(messages) <= INLINE_CHARS_MAX
                asked = (tuple(messages), kwargs, tools)
                if (
                    texts.codec is not None
                    and texts.renders
                    and short
                    and not texts.codec.may_forge(*asked)
                ):
                    tokens = texts.codec.encode_chat(*asked, special_tokens_in_content)
                else:
                    further = (*asked, special_tokens_in_content)
                    tokens = await self._called(texts, "encode_chat", *further, chars=chars)
        if not isinstance(tokens, tuple | array):
            raise MeshError(f"the tokenizer of {model_id} gave no tokens")
        if not tokens:
            raise InvalidInput("the prompt comes to no tokens", hint="give it some text")
        return tuple(tokens)

    async def text(self, model_id: ModelId, token_ids: tuple[int, ...]) -> str:
        """What the tokens say, special ones by their names. Raises as `tokens` does."""
        texts = await self._texts(model_id)
        if texts.codec is not None and len(token_ids) <= INLINE_TOKENS_MAX:
            return texts.codec.decode(token_ids, special_tokens=True)
        chars = CHARS_PER_TOKEN * len(token_ids)
        return str(await self._called(texts, "decode", token_ids, chars=chars))

    async def fault(self, model_id: ModelId) -> str:
        """What of the model's texts is refused, and why; empty where nothing is, or where that is
        not known within FAULT_S_MAX.
        """
        try:
            async with asyncio.timeout(FAULT_S_MAX):
                fault = (await self._texts(model_id)).template_fault
        except ModelError as error:
            return f"it takes no texts: {error.message}"
        except (TimeoutError, MeshError):
            return ""
        return f"its chats are refused: {fault}" if fault else ""

    def failure(self, model_id: ModelId) -> str:
        """Why the model takes no texts, as its last trial found; empty where it takes them, or
        where that is not known yet.
        """
        _, failure = self._failed.get(model_id, (0.0, None))
        return f"it takes no texts: {failure.message}" if failure is not None else ""

    async def sampling_defaults(self, model_id: ModelId) -> SamplingDefaults:
        return (await self._texts(model_id)).sampling

    async def tool_format(self, model_id: ModelId) -> ToolFormat:
        """How the model calls tools, as its chat template tells."""
        return (await self._texts(model_id)).tool_format

    async def calls_by_tokens(self, model_id: ModelId, vocabulary_tokens: int) -> bool:
        """Whether the model has tokens for the marks of its calls, and can give them out: a
        tokenizer may know more tokens than the model.
        """
        texts = await self._texts(model_id)
        return texts.calls_by_tokens and texts.last_mark_id < vocabulary_tokens

    async def thinking(
        self, model_id: ModelId, template_kwargs: str, vocabulary_tokens: int
    ) -> Thinking | None:
        """How its answers to chats begin; None: with no thought."""
        texts = await self._texts(model_id)
        thinking = await self._thinking(texts, template_kwargs)
        if thinking is None or texts.last_mark_id < vocabulary_tokens:
            return thinking
        return replace(thinking, by_tokens=False)

    async def _thinking(self, texts: _Texts, template_kwargs: str) -> Thinking | None:
        if not texts.thinks:
            return None
        if template_kwargs in texts.thinking:
            return texts.thinking[template_kwargs]
        if texts.codec is not None and texts.renders and len(template_kwargs) <= INLINE_CHARS_MAX:
            return texts.codec.thinking(template_kwargs)
        chars = len(template_kwargs)
        thinking = _thinking(await self._called(texts, "thinking", template_kwargs, chars=chars))
        if chars <= THINKING_CHARS_MAX:
            texts.thinking[template_kwargs] = thinking
            forget_oldest(texts.thinking, THINKINGS_MAX)
        return thinking

    async def token_bytes(self, model_id: ModelId) -> Callable[[int], bytes]:
        """What each token of the model adds to a text."""
        texts = await self._texts(model_id)
        if texts.codec is not None:
            return texts.codec.token_bytes
        if texts.vocabulary is None:
            texts.vocabulary = list(map(bytes.fromhex, await self._called(texts, "vocabulary")))
        vocabulary = texts.vocabulary
        return lambda token: vocabulary[token] if 0 <= token < len(vocabulary) else b""

    async def check_grammar(self, grammar: Grammar) -> None:
        """Raises InvalidInput, with what of it cannot be kept to; Refused as `tokens` does."""
        if grammar not in self._grammars:
            key = sha256(f"{grammar.kind} {grammar.text}".encode(errors="replace")).digest()
            owner = Owner(tenant=caller().tenant, name="grammar", key=key)
            await self._pool.call(owner, None, "check_grammar", grammar, chars=len(grammar.text))
            self._grammars[grammar] = None
            forget_oldest(self._grammars, GRAMMARS_MAX)
        else:
            self._grammars.move_to_end(grammar)

    def warm(self, model_id: ModelId, name: DeploymentName) -> None:
        """Begin to build what will be needed, and try it. Its failure is logged under the
        deployment's name, and told to whoever waits for it.
        """
        if model_id not in self._building and len(self._building) < self._codecs_max:
            self._start(model_id).add_done_callback(lambda done: _log_failure(done, name))

    def warm_all(self, deployed: Mapping[ModelId, DeploymentName]) -> None:
        """Warm those of these models, as many as there is room for, and drop those of others."""
        for model_id in [one for one in self._building if one not in deployed]:
            del self._building[model_id]
        for model_id, name in deployed.items():
            self.warm(model_id, name)

    async def close(self) -> None:
        """End the child processes, and wait for the build under way: a thread cannot be stopped."""
        await self._pool.close()
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        self._building.clear()
        await asyncio.to_thread(self._builder.shutdown)

    async def _called(self, texts: _Texts, method: str, *arguments: Any, chars: int = 0) -> Any:
        assets = partial(self._assets, texts.name)
        return await self._pool.call(texts.owner, assets, method, *arguments, chars=chars)

    def _assets(self, model_id: ModelId) -> TextAssets:
        assets = self._find(model_id)
        if assets is None:
            raise StorageError(
                f"the registry holds no tokenizer of model {model_id}",
                hint="delete its deployment and deploy it again",
            )
        return assets

    async def _texts(self, model_id: ModelId) -> _Texts:
        task = self._building.get(model_id) or self._start(model_id)
        self._building.move_to_end(model_id)
        return task.result() if task.done() else await asyncio.shield(task)

    def _start(self, model_id: ModelId) -> "asyncio.Task[_Texts]":
        def built(done: "asyncio.Task[_Texts]") -> None:
            """A failure is told to those who wait, if anybody does; who comes later tries anew."""
            failed = done.cancelled() or done.exception() is not None
            if failed and self._building.get(model_id) is done:
                del self._building[model_id]

        task = asyncio.ensure_future(self._built(model_id))
        task.add_done_callback(built)
        self._building[model_id] = task
        forget_oldest(self._building, self._codecs_max)
        return task

    async def _built(self, model_id: ModelId) -> _Texts:
        until_s, failure = self._failed.get(model_id, (0.0, None))
        if failure is not None and until_s > asyncio.get_running_loop().time():
            raise failure.with_traceback(None)
        try:
            made = await self._made(model_id)
            self._failed.pop(model_id, None)
            return made
        except ModelError as error:
            self._failed[model_id] = (asyncio.get_running_loop().time() + FAILED_S, error)
            forget_oldest(self._failed, self._codecs_max)
            raise

    async def _made(self, model_id: ModelId) -> _Texts:
        loop = asyncio.get_running_loop()
        assets = await loop.run_in_executor(self._builder, self._assets, model_id)
        key = await loop.run_in_executor(self._builder, codec_key, assets)
        for task in self._building.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                same = task.result()
                if same.key == key:
                    return replace(same, name=model_id)
        # With Jinja, which takes 30 ms of CPU, and many controllers want none.
        from mesh.text.recognised import is_harmless_template, is_harmless_tokenizer

        templates = (assets.chat_template, assets.tool_template)
        codec, renders = None, all(map(is_harmless_template, templates))
        if is_harmless_tokenizer(assets.tokenizer_json):
            inline = assets if renders else replace(assets, chat_template=None, tool_template=None)
            codec = await loop.run_in_executor(self._builder, TextCodec, inline)
        size = len(assets.tokenizer_json)
        known: Mapping[str, Any]
        if codec is not None and renders:
            known = await loop.run_in_executor(self._builder, codec.known)
        else:
            owner = Owner(tenant="", name=model_id, key=key, tokenizer_bytes=size)
            known = await self._pool.tried(owner, assets)
            await self._pool.call(owner, lambda: assets, "ready")
        return _Texts(
            name=model_id,
            key=key,
            tokenizer_bytes=size,
            sampling=assets.sampling,
            codec=codec,
            renders=renders,
            tool_format=ToolFormat(known["tool_format"]),
            calls_by_tokens=bool(known["calls_by_tokens"]),
            last_mark_id=int(known["last_mark_id"]),
            thinks=bool(known["thinks"]),
            template_fault=str(known["template_fault"]),
            thinking=OrderedDict({"": _thinking(known["thinking"])}),
        )


def _thinking(said: Any) -> Thinking | None:
    return None if said is None else Thinking(amid=bool(said[0]), by_tokens=bool(said[1]))


def _log_failure(done: "asyncio.Task[Any]", name: DeploymentName) -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, MeshError):
        logger.error("%s takes no texts: %s", name, error.message)
    elif error is not None:
        logger.error("%s takes no texts", name, exc_info=error)
