"""OpenAI's own client for Python on Responses: whole, streamed, continued, kept, tools, errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from mesh.domain.messages import SubmitRequest
from tests.clients.conftest import Served
from tests.http.edge import Edge, edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL

openai = pytest.importorskip("openai", reason="make test-clients has it")

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class City(BaseModel):
    name: str


ASKED: dict[str, Any] = {"model": "chat", "input": "hi", "max_output_tokens": 200}


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def asking(home: Path, says: str) -> AsyncIterator[tuple[Edge, Any, Any]]:
    """A cell whose model thinks, calls tools and says that; its node and a client of it."""
    async with (
        edge(home) as http,
        openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield http, await thinking(http, says), client


def strict(answer: Any) -> None:
    """Its model takes all of it, without a coercion."""
    type(answer).model_validate(answer.model_dump(by_alias=True), strict=True)


async def test_text_whole_and_streamed(client: Any) -> None:
    whole = await client.responses.create(model="chat", input="hi", max_output_tokens=3)
    strict(whole)
    assert (whole.output_text, whole.status) == ("aaa", "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 3
    events = []
    stream = await client.responses.create(
        model="chat", input=[{"role": "user", "content": "hi"}], max_output_tokens=3, stream=True
    )
    async for event in stream:
        strict(event)
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert events[-1].response.output == [events[-2].item]


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_and_calls_go_there_and_back(tmp_path: Path, stream: bool) -> None:
    async with asking(tmp_path, f"<think>Well.</think>I look.\n{CALL}") as (_, node, client):
        asked = {**ASKED, "tools": [TOOL], "reasoning": {"effort": "medium"}}
        if stream:
            async with client.responses.stream(**asked) as told:
                response = await told.get_final_response()
        else:
            response = await client.responses.create(**asked)
            strict(response)
        thought, words, call = response.output
        assert thought.content[0].text == "Well."
        assert words.content[0].text == response.output_text == "I look."
        assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
        node.says = "It rains."
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        asked["input"] = [{"role": "user", "content": "hi"}, *response.output, result]
        answer = await client.responses.create(**asked)
        continued = await client.responses.create(
            **{**asked, "input": [result]}, previous_response_id=response.id
        )
        assert answer.output_text == continued.output_text == "It rains."
        prompts = [
            c.order.request.prompt_tokens for c in node.commands if isinstance(c, SubmitRequest)
        ]
        assert prompts[1] == prompts[2]
        kept = await client.responses.retrieve(continued.id)
        strict(kept)
        assert (kept, kept.previous_response_id) == (continued, response.id)
        await client.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept.id)


async def test_an_answer_is_parsed_by_its_format(tmp_path: Path) -> None:
    async with asking(tmp_path, '{"name": "Bern"}') as (_, _, client):
        asked = {**ASKED, "reasoning": {"effort": "none"}}
        response = await client.responses.parse(**asked, text_format=City)
        assert response.output_parsed == City(name="Bern")
        assert response.text.format.name == "City"


async def test_logprobs_are_of_the_text(client: Any) -> None:
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "max_output_tokens": 2}
    response = await client.responses.create(**asked, top_logprobs=2)
    strict(response)
    (part,) = response.output[0].content
    assert len(part.logprobs) == 2
    assert len(part.logprobs[0].top_logprobs) == 2
    told = list[float]()
    async for event in await client.responses.create(**asked, stream=True):
        strict(event)
        if event.type == "response.output_text.delta":
            told += [one.logprob for one in event.logprobs]
    assert told == [one.logprob for one in part.logprobs]


async def test_input_is_counted(client: Any) -> None:
    counted = await client.responses.input_tokens.count(
        model="chat", input="hi", instructions="Be brief."
    )
    assert counted.input_tokens == len("<system>Be brief.<user>hi<assistant>")


async def test_errors_are_of_its_classes(served: Served, client: Any) -> None:
    create = client.responses.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(**{**ASKED, "model": "chta"})
    assert missing.value.code == "model_not_found"
    for wrong, param in (
        ({"input": "x" * 600}, None),
        ({"previous_response_id": "resp_r0-1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            await create(**{**ASKED, **wrong})
        assert bad.value.param == param
    answer = await create(**{**ASKED, "max_output_tokens": 1})
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel(answer.id)


async def test_a_failure_amid_a_stream_fails_the_response(served: Served, client: Any) -> None:
    stream = await served.begun(client.responses.create(**ASKED, stream=True))
    served.cell.stop.set()
    events = [event async for event in stream]
    strict(events[-1])
    assert events[-1].type == "response.failed"
    assert "stopping" in events[-1].response.error.message
