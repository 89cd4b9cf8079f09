"""Tokenizers are built once each, only so many are kept, and what is hostile harms nobody else."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from mesh.controller.tokenizers import INLINE_CHARS_MAX, Tokenizers
from mesh.domain.errors import InvalidInput, MeshError, Refused, StorageError, UnsupportedModel
from mesh.domain.grammar import Grammar, GrammarKind
from mesh.domain.ids import DeploymentName, ModelId
from mesh.domain.invocation import ChatPrompt, TextPrompt
from mesh.domain.reasons import RefusalReason
from mesh.domain.text import ChatMessage, TextAssets
from mesh.text import pool as pools
from mesh.text.pool import TextPool
from mesh.text.tokenizer import TextCodec
from tests.controller.live import WAIT_S_MAX
from tests.text.conftest import tiny_assets

ONE, TWO, THREE = ModelId("one"), ModelId("two"), ModelId("three")
HI = TextPrompt(text="hi")
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ON_BOMB = "{{% if messages[0].content == 'bomb' %}}{}{{% endif %}}{{{{ messages[0].content }}}}"
"""A template that is harmless when it is tried."""


def chat(text: str) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content=text),))


def templated(template: str) -> TextAssets:
    return replace(tiny_assets(), chat_template=template)


def tokenizer(**parts: Any) -> TextAssets:
    made = {**json.loads(tiny_assets().tokenizer_json), **parts}
    return replace(tiny_assets(), tokenizer_json=json.dumps(made).encode())


class Shelf:
    """Models' texts, as a registry has them, and how often each was looked up."""

    def __init__(self, **known: TextAssets) -> None:
        self.known = {ModelId(name): assets for name, assets in known.items()}
        self.found: list[ModelId] = []
        self.pool = TextPool()
        self.tokenizers = Tokenizers(find=self._find, pool=self.pool, codecs_max=2)

    def _find(self, model_id: ModelId) -> TextAssets | None:
        self.found.append(model_id)
        return self.known.get(model_id)

    async def error(self, model_id: ModelId, prompt: TextPrompt | ChatPrompt) -> MeshError:
        with pytest.raises(MeshError) as caught:
            await self.tokenizers.tokens(model_id, prompt)
        return caught.value


@asynccontextmanager
async def opened(**known: TextAssets) -> AsyncIterator[Shelf]:
    shelf = Shelf(**known)
    try:
        yield shelf
    finally:
        await shelf.tokenizers.close()


def children(pool: TextPool) -> int:
    return sum(place.running is not None for place in pool._places)


async def test_a_codec_is_built_once_for_all_who_wait() -> None:
    async with opened(one=tiny_assets()) as shelf:
        answers = await asyncio.gather(*(shelf.tokenizers.tokens(ONE, HI) for _ in range(5)))
        assert answers == [TextCodec(tiny_assets()).encode("hi")] * 5
        assert shelf.found == [ONE]
        assert children(shelf.pool) == 0


async def test_the_least_used_codec_goes_first() -> None:
    async with opened(one=tiny_assets(), two=templated("2"), three=templated("3")) as shelf:
        for model in (ONE, TWO, ONE, THREE, ONE, TWO):
            await shelf.tokenizers.tokens(model, HI)
        assert shelf.found == [ONE, TWO, THREE, TWO]


async def test_what_is_deployed_no_more_leaves_its_room_to_what_is() -> None:
    name = DeploymentName("chat")
    async with opened(one=tiny_assets(), two=templated("2"), three=templated("3")) as shelf:
        for models in ((ONE, TWO), (TWO, THREE)):
            shelf.tokenizers.warm_all(dict.fromkeys(models, name))
            for model in models:
                await shelf.tokenizers.tokens(model, HI)
        assert shelf.found == [ONE, TWO, THREE]


async def test_a_model_without_texts_is_asked_for_again() -> None:
    async with opened() as shelf:
        for _ in range(2):
            with pytest.raises(StorageError, match="no tokenizer of model one"):
                await shelf.tokenizers.tokens(ONE, HI)
        shelf.known[ONE] = tiny_assets()
        assert await shelf.tokenizers.tokens(ONE, HI)


async def test_the_loop_goes_on_while_the_registry_waits_for_its_disk() -> None:
    """A template that is not recognised has a child process read the registry, too."""
    written = threading.Event()
    asked = templated("{% set n = 1 %}{{ messages[0].content }}")
    tokenizers = Tokenizers(find=lambda _: asked if written.wait(5.0) else None, pool=TextPool())
    for _ in range(2):
        written.clear()
        asyncio.get_running_loop().call_later(0.05, written.set)
        assert await tokenizers.tokens(ONE, chat("hi"))
    await tokenizers.close()


async def test_a_prompt_without_tokens_is_invalid() -> None:
    async with opened(one=replace(tiny_assets(), add_bos=False)) as shelf:
        with pytest.raises(InvalidInput, match="comes to no tokens"):
            await shelf.tokenizers.tokens(ONE, TextPrompt(text=""))


async def test_what_runs_elsewhere_gives_the_tokens_that_the_codec_gives() -> None:
    """Long prompts, templates that are not recognised, and tokenizers that are not."""
    template = "{% set n = namespace(x=1) %}{{ messages[0].content }}<think>{{ '</think>' if q }}"
    model = templated(template)
    split = {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Isolated"}
    foreign = tokenizer(pre_tokenizer={**split, "invert": False})
    long = "the cat sat " * INLINE_CHARS_MAX
    async with opened(one=model, two=foreign) as shelf:
        codec, other, ask = TextCodec(model), TextCodec(foreign), shelf.tokenizers
        assert await ask.tokens(ONE, TextPrompt(text=long)) == codec.encode(long)
        assert await ask.tokens(ONE, chat("hi")) == codec.encode_chat(chat("hi").messages)
        assert await ask.tool_format(ONE) is codec.tool_format
        for kwargs in ("", '{"q": true}', ""):
            assert await ask.thinking(ONE, kwargs, 1 << 20) == codec.thinking(kwargs)
        assert await ask.tokens(TWO, HI) == other.encode("hi")
        spelled = await ask.token_bytes(TWO)
        tokens = range(-1, other.vocabulary_tokens + 1)
        assert [spelled(token) for token in tokens[1:]] == list(map(other.token_bytes, tokens[1:]))
        with pytest.raises(InvalidInput, match="not valid Unicode"):
            await ask.tokens(TWO, TextPrompt(text="\ud800"))


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        (templated(LOOP), "took more than 1.0 s of processor time, which is the limit"),
        (templated("{% set a = 'a' * 1500000000 %}{{ a|length }}"), "256 MiB of further memory"),
        (templated("{{ 'x'|center(1000000000) }}"), "256 MiB of further memory"),
        (templated("{{ messages|tojson(indent=1000000000) }}"), "256 MiB of further memory"),
        (templated("{{ '%1000000000d' % 1 }}"), "256 MiB of further memory"),
        (
            tokenizer(
                normalizer={
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
                    ]
                    * 5,
                }
            ),
            "which is the limit",  # of memory or of time: that depends on the machine
        ),
        (
            tokenizer(decoder={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}),
            "or what a regular expression finds",
        ),
    ],
)
async def test_a_model_is_refused_with_its_trials_limit(model: TextAssets, limit: str) -> None:
    async with opened(one=model, two=tiny_assets()) as shelf:
        first = await shelf.error(ONE, chat("hi"))
        assert isinstance(first, UnsupportedModel)
        assert limit in first.message
        assert (await shelf.error(ONE, chat("hi"))).message == first.message
        assert shelf.found == [ONE], "it is not tried again at once"
        assert await shelf.tokenizers.tokens(TWO, chat("hi"))


async def test_warming_logs_deployments_whose_texts_fail(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(one=templated(LOOP), two=tiny_assets()) as shelf:
        with caplog.at_level(logging.ERROR):
            shelf.tokenizers.warm(ONE, DeploymentName("bad"))
            shelf.tokenizers.warm(TWO, DeploymentName("good"))
            assert await shelf.tokenizers.tokens(TWO, HI)
            await shelf.error(ONE, HI)
        assert [record.getMessage()[:20] for record in caplog.records] == ["bad takes no texts: "]
        assert "1.0 s of processor time" in caplog.text


async def test_what_could_not_be_warmed_is_built_for_who_asks_first() -> None:
    async with opened() as shelf:
        shelf.tokenizers.warm_all({ONE: DeploymentName("late")})
        async with asyncio.timeout(WAIT_S_MAX):
            while not shelf.found:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        shelf.known[ONE] = tiny_assets()
        assert await shelf.tokenizers.tokens(ONE, HI)


async def test_endless_calls_put_their_model_on_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the event loop, not the long prompts of others, and not longer than two kills take."""
    monkeypatch.setattr(pools, "WAIT_S_MAX", WAIT_S_MAX)
    bad = templated(ON_BOMB.format(LOOP))
    async with opened(one=bad, two=tiny_assets()) as shelf:
        ask = shelf.tokenizers
        long = TextPrompt(text="the cat " * INLINE_CHARS_MAX)
        assert await ask.tokens(ONE, chat("hi"))
        expected = await ask.tokens(TWO, long)
        calls = [asyncio.create_task(shelf.error(ONE, chat("bomb"))) for _ in range(8)]
        others = 0
        while not all(call.done() for call in calls):
            assert await asyncio.wait_for(ask.tokens(TWO, long), WAIT_S_MAX) == expected
            assert await asyncio.wait_for(ask.tokens(TWO, HI), WAIT_S_MAX)
            others += 1
        assert others > 20, "in the time of two kills; one alone would be over before a third"
        errors = [call.result() for call in calls]
        late = [error for error in errors if isinstance(error, InvalidInput)]
        held = [error for error in errors if isinstance(error, Refused)]
        assert len(late) == pools.KILLS_MAX
        assert "took more than 1.0 s of processor time" in late[0].message
        assert [error.reason for error in held] == [RefusalReason.TEXT_ON_HOLD] * 6
        assert all(0 < error.retry_after_s <= pools.HOLD_S for error in held)


async def test_a_panic_is_the_error_of_its_text() -> None:
    """The panic comes from onig, which reaches its retry limit: it is not even an Exception."""
    split = {
        "type": "Split",
        "pattern": {"Regex": "(?:(a|aa)+)+$x|(a|aa)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    async with opened(one=tokenizer(pre_tokenizer=split)) as shelf:
        failed = await shelf.error(ONE, TextPrompt(text="a" * 100))
        assert isinstance(failed, InvalidInput)
        assert "retry-limit-in-match over" in failed.message
        assert await shelf.tokenizers.tokens(ONE, HI)


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded in the calls of one model, and in the time that one waits."""
    monkeypatch.setattr(pools, "WAITING_OF_ONE_MAX", 2)
    monkeypatch.setattr(pools, "WAIT_S_MAX", 0.2)
    async with opened(one=templated(ON_BOMB.format(LOOP))) as shelf:
        assert await shelf.tokenizers.tokens(ONE, chat("hi"))
        errors = await asyncio.gather(*(shelf.error(ONE, chat("bomb")) for _ in range(4)))
        reasons = [error.reason for error in errors if isinstance(error, Refused)]
        assert sorted(reasons) == [RefusalReason.QUEUE_FULL] + [RefusalReason.QUEUE_TIMEOUT] * 2


async def test_a_grammar_is_checked_in_a_process_and_known_from_then_on() -> None:
    good = Grammar(kind=GrammarKind.REGEX, text="[a-z]+")
    bad = Grammar(kind=GrammarKind.REGEX, text="[a-z")
    async with opened() as shelf:
        await shelf.tokenizers.check_grammar(good)
        with pytest.raises(InvalidInput, match="cannot be kept to") as caught:
            await shelf.tokenizers.check_grammar(bad)
        assert caught.value.field == "grammar"
        endless = Grammar(
            kind=GrammarKind.JSON_SCHEMA, text='{"type": "integer", "multipleOf": 99999999}'
        )
        with pytest.raises(InvalidInput, match=r"grammar took more than .* of processor time"):
            await shelf.tokenizers.check_grammar(endless)
        with pytest.raises(InvalidInput, match="cannot be kept to"):
            await shelf.tokenizers.check_grammar(
                Grammar(kind=GrammarKind.LARK, text="start: start")
            )
        assert children(shelf.pool) == 1
        await shelf.tokenizers.close()
        await shelf.tokenizers.check_grammar(good)
