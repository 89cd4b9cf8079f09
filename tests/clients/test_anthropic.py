"""Anthropic's own client for Python: whole and streamed, sync and async, tools, its errors."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.messages import AbortRequest
from tests.clients.conftest import CALLS_MAX, Served
from tests.http.edge import edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL

anthropic = pytest.importorskip("anthropic", reason="make test-clients has it")
HELLO = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "chat", "messages": HELLO, "max_tokens": 3}
TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def base_of(served: Served) -> str:
    return served.url.removesuffix("/v1")


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=base_of(served), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(
        base_url=base_of(served), api_key="none", max_retries=0
    ) as client:
        yield client


def strict(answer: Any) -> None:
    """Its model takes all of it, without a coercion."""
    type(answer).model_validate(answer.model_dump(), strict=True)


async def test_a_message_whole_and_streamed(client: Any) -> None:
    whole = await asyncio.to_thread(lambda: client.messages.create(**ASKED))
    strict(whole)
    assert [block.text for block in whole.content] == ["aaa"]
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 3)
    assert whole._request_id == "r1-1"

    def streamed() -> tuple[str, Any]:
        with client.messages.stream(**ASKED) as stream:
            return "".join(stream.text_stream), stream.get_final_message()

    text, message = await asyncio.to_thread(streamed)
    strict(message)
    assert (text, message.stop_reason) == ("aaa", "max_tokens")
    assert message.usage.output_tokens == 3


async def test_raw_events_come_in_their_order(async_client: Any) -> None:
    stream = await async_client.messages.create(**ASKED, stream=True)
    events = [event async for event in stream]
    for event in events:
        strict(event)
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_and_calls_go_there_and_back(tmp_path: Path, stream: bool) -> None:
    async with (
        edge(tmp_path) as http,
        anthropic.AsyncAnthropic(base_url=http.url, api_key="none", max_retries=0) as client,
    ):
        node = await thinking(http, f"<think>Well.</think>{CALL}")
        asked: dict[str, Any] = {
            **ASKED,
            "max_tokens": 200,
            "tools": [TOOL],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        if stream:
            async with client.messages.stream(**asked) as told:
                message = await told.get_final_message()
        else:
            message = await client.messages.create(**asked)
        strict(message)
        thought, call = message.content
        assert (thought.thinking, message.stop_reason) == ("Well.", "tool_use")
        assert (call.name, call.input) == ("weather", {"city": "Bern"})
        node.says = "It rains."
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        asked["messages"] = [*HELLO, message.to_param(), {"role": "user", "content": [result]}]
        answer = await client.messages.create(**asked)
        assert (answer.content[0].text, answer.stop_reason) == ("It rains.", "end_turn")


async def test_tokens_are_counted(async_client: Any) -> None:
    asked = {name: ASKED[name] for name in ("model", "messages")}
    counted = await async_client.messages.count_tokens(**asked, system="Be brief.")
    assert counted.input_tokens == len("<system>Be brief.<user>hi<assistant>")


async def test_its_beta_client_and_unknown_betas_are_served(async_client: Any) -> None:
    answer = await async_client.beta.messages.create(**ASKED, betas=["of-tomorrow-2031-01-01"])
    assert answer.content[0].text == "aaa"


async def test_errors_are_of_its_classes(served: Served, async_client: Any) -> None:
    create = async_client.messages.create
    with pytest.raises(anthropic.NotFoundError) as missing:
        await create(**{**ASKED, "model": "chta"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await create(**{**ASKED, "messages": [{"role": "user", "content": "x" * 600}]})
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        await create(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})
    served.node.held = True
    held = [asyncio.create_task(create(**ASKED)) for _ in range(CALLS_MAX)]
    status = served.cell.client.status
    await served.cell.until(lambda: status().running + status().queued == CALLS_MAX)
    with pytest.raises(anthropic.RateLimitError):
        await create(**ASKED)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_a_failure_amid_a_stream_is_raised(served: Served, async_client: Any) -> None:
    stream = await served.begun(async_client.messages.create(**ASKED, stream=True))
    served.cell.stop.set()
    with pytest.raises(anthropic.APIStatusError, match="stopping"):
        _ = [event async for event in stream]


async def test_closing_a_stream_frees_the_place(served: Served, async_client: Any) -> None:
    stream = await served.begun(async_client.messages.create(**ASKED, stream=True))
    await stream.close()
    await served.node.told(AbortRequest)
    await served.cell.idle()
