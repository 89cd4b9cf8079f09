"""OpenAI's own client for Python: whole and streamed, sync and async, its errors and retries."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.ids import NodeId
from mesh.domain.messages import AbortRequest, SubmitRequest
from mesh.domain.model import Task
from tests.clients.conftest import CALLS_MAX, CLIENT_S_MAX, Served
from tests.controller.live import EMBEDS, SPEC, VECTOR

openai = pytest.importorskip("openai", reason="make test-clients has it")
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


async def test_models(client: Any) -> None:
    (model,) = await asyncio.to_thread(lambda: list(client.models.list()))
    assert model == await asyncio.to_thread(client.models.retrieve, "chat")
    assert (model.id, model.max_model_len) == ("chat", 512)


async def test_a_chat_whole_and_streamed(client: Any) -> None:
    whole = await asyncio.to_thread(
        lambda: client.chat.completions.create(model="chat", messages=HELLO, max_tokens=3)
    )
    assert whole.choices[0].message.content == "aaa"
    assert whole.usage.completion_tokens == 3
    assert whole._request_id == "r1-1"

    def streamed() -> str:
        chunks = client.chat.completions.create(
            model="chat", messages=HELLO, max_tokens=3, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(streamed) == "aaa"


async def test_embeddings(client: Any, served: Served) -> None:
    """By default the client asks for base64, and reads it."""
    await served.cell.node(node_id=NodeId("n2"), run_id="run-2", embeds=True)
    spec = replace(SPEC, name=EMBEDS, task=Task.EMBED)
    await served.cell.ask(served.cell.client.deploy, spec)

    def told(**how: str) -> Any:
        return client.embeddings.create(model="embeds", input=["a", "bc"], **how)

    for how in ({}, {"encoding_format": "float"}):
        answer = await asyncio.to_thread(told, **how)
        assert [one.index for one in answer.data] == [0, 1]
        assert [one.embedding for one in answer.data] == [pytest.approx(VECTOR)] * 2
        assert (answer.usage.prompt_tokens, answer.model) == (3, "embeds")
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        await asyncio.to_thread(
            lambda: client.embeddings.create(model="embeds", input="a", dimensions=1)
        )


async def test_the_helper_for_streams(async_client: Any) -> None:
    async with async_client.chat.completions.stream(
        model="chat", messages=HELLO, max_tokens=5, stream_options={"include_usage": True}
    ) as stream:
        pieces = [event.delta async for event in stream if event.type == "content.delta"]
        answer = stream.current_completion_snapshot
    assert "".join(pieces) == answer.choices[0].message.content == "aaaaa"
    assert answer.usage.completion_tokens == 5


async def test_completions_of_several_prompts(async_client: Any) -> None:
    answer = await async_client.completions.create(
        model="chat", prompt=["x", "yz"], max_tokens=2, extra_body={"top_k": 5}
    )
    assert [choice.text for choice in answer.choices] == ["aa", "aa"]
    pieces = await async_client.completions.create(
        model="chat", prompt=[1, 2], max_tokens=2, stream=True
    )
    assert "".join([piece.choices[0].text async for piece in pieces]) == "aa"


async def test_errors_are_of_its_classes(async_client: Any) -> None:
    create = async_client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="chta", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await create(model="chat", messages=[{"role": "user", "content": "x" * 600}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unbuilt:
        await create(model="chat", messages=HELLO, n=1000)
    assert unbuilt.value.param == "n"


def taken(served: Served) -> int:
    status = served.cell.client.status()
    return status.running + status.queued


async def test_it_retries_when_it_is_told_when(served: Served) -> None:
    """All places are taken; then one is not, and the second try gets it."""
    served.node.held = True
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=2) as client:
        create = client.completions.create
        held = [
            asyncio.create_task(create(model="chat", prompt=[n], max_tokens=1))
            for n in range(1, CALLS_MAX + 1)
        ]
        await served.cell.until(lambda: taken(served) == CALLS_MAX)
        asked = asyncio.create_task(create(model="chat", prompt="x", max_tokens=1))
        await asyncio.sleep(0.3)
        served.node.held = False
        for command in [c for c in served.node.commands if isinstance(c, SubmitRequest)]:
            await served.node.answer(command.order, 0, 1, last=True)
        assert (await asked).choices[0].text == "a"
        await asyncio.gather(*held)


async def test_a_failure_amid_a_stream_is_raised(served: Served, async_client: Any) -> None:
    create = async_client.completions.create
    stream = await served.begun(create(model="chat", prompt="x", stream=True))
    served.cell.stop.set()
    with pytest.raises(openai.APIError, match="stopping"):
        _ = [chunk async for chunk in stream]


async def test_closing_a_stream_frees_the_place(served: Served, async_client: Any) -> None:
    create = async_client.completions.create
    stream = await served.begun(create(model="chat", prompt="x", stream=True))
    await stream.close()
    await served.node.told(AbortRequest)
    await served.cell.idle()


async def test_batches(served: Served, async_client: Any) -> None:
    files, batches = async_client.files, async_client.batches

    def lines(count: int) -> bytes:
        body = {"model": "chat", "messages": HELLO, "max_tokens": 2}
        asked = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        return "\n".join(json.dumps({"custom_id": f"c{n}", **asked}) for n in range(count)).encode()

    async def begun(content: bytes) -> Any:
        file = await files.create(file=("calls.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes) == ("calls.jsonl", len(content))
        assert (await files.content(file.id)).content == content
        endpoint, named = "/v1/chat/completions", {"who": "me"}
        batch = await batches.create(
            input_file_id=file.id,
            endpoint=endpoint,
            completion_window="24h",
            metadata=named,
        )
        assert (batch.endpoint, batch.metadata, batch.output_file_id) == (endpoint, named, None)
        return batch

    async def reached(batch: Any, *states: str) -> Any:
        async with asyncio.timeout(CLIENT_S_MAX):
            while batch.status not in states:
                await asyncio.sleep(0.05)
                batch = await batches.retrieve(batch.id)
        return batch

    async def ended(batch: Any) -> Any:
        return await reached(batch, "completed", "failed", "cancelled")

    whole = await ended(await begun(lines(10)))
    assert (whole.status, whole.request_counts.completed, whole.error_file_id) == (
        *("completed", 10),
        None,
    )
    told = (await files.content(whole.output_file_id)).text.splitlines()
    answers = [
        openai.types.chat.ChatCompletion(**json.loads(one)["response"]["body"]) for one in told
    ]
    assert [one.choices[0].message.content for one in answers] == ["aa"] * 10

    wrong = await ended(await begun(lines(1) + b'\n{"custom_id": "torn'))
    assert [(one.code, one.line) for one in wrong.errors.data] == [("invalid_json_line", 2)]

    served.node.held = True
    held = await reached(await begun(lines(2)), "in_progress")
    assert (await batches.cancel(held.id)).status == "cancelling"
    assert (await ended(held)).status == "cancelled"
    found = [one.id async for one in batches.list(limit=1)]
    assert found == [held.id, wrong.id, whole.id], "page by page"
    with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
        await batches.cancel(held.id)

    assert len([one async for one in files.list(purpose="batch_output")]) == 2
    assert (await files.delete(whole.output_file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await files.retrieve(whole.output_file_id)
