"""Anthropic's Messages over HTTP: what a template is given, answers whole and streamed, errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import requests

from mesh.controller.gateway import GatewayLimits
from mesh.domain.grammar import GrammarKind
from mesh.domain.invocation import Finished, Invocation, TextPrompt, Tokens
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import FinishReason
from mesh.http.answers import AnswerTo
from mesh.http.exchange import BODY_BYTES_MAX
from mesh.http.message_answers import MessageAnswer, MessageErrorBody, MessageWriter
from mesh.http.tokens import TokenCount
from tests.controller.live import QUICK, SPEC
from tests.http.edge import HELLO, Edge, edge, events
from tests.http.test_answers import held_to
from tests.http.test_thoughts import QWEN, thinking
from tests.http.test_tools import CALL, calling, orders

BASE: dict[str, Any] = {"model": "chat", "max_tokens": 200, "messages": HELLO}
TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def send(http: Edge, **body: Any) -> requests.Response:
    return await http.post("/v1/messages", {**BASE, **body})


async def answered(http: Edge, **body: Any) -> dict[str, Any]:
    response = await send(http, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    held_to(MessageAnswer, answer)
    return answer


async def streamed(http: Edge, **body: Any) -> list[dict[str, Any]]:
    """The events; each one's name is its type."""
    response = await send(http, stream=True, **body)
    assert response.status_code == 200, response.text
    told = list(events(response))
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    assert names == [one["type"] for one in told]
    return told


def error_of(response: requests.Response) -> dict[str, str]:
    body = response.json()
    held_to(MessageErrorBody, body)
    error: dict[str, str] = body["error"]
    return error


def rebuilt(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events tell, in the order that the protocol has for them."""
    start, ping, *middle, delta, stop = told
    assert [one["type"] for one in (start, ping, delta, stop)] == [
        *("message_start", "ping", "message_delta", "message_stop")
    ]
    message: dict[str, Any] = start["message"]
    held_to(MessageAnswer, message)
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in middle:
        last = len(message["content"]) - 1
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert not is_open
                assert index == last + 1
                message["content"].append({**block, "json": ""})
                is_open = True
            case {"type": "content_block_delta", "index": index, "delta": said}:
                assert is_open
                assert index == last
                kind = said.pop("type").removesuffix("_delta")
                assert (kind == "input_json") == (message["content"][-1]["type"] == "tool_use")
                for name, more in said.items():
                    name = "json" if name == "partial_json" else name
                    message["content"][-1][name] += more
            case {"type": "content_block_stop", "index": index}:
                assert is_open
                assert index == last
                is_open = False
            case _:
                raise AssertionError(event)
    assert not is_open
    for block in message["content"]:
        said = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(said)
    message.update(delta["delta"])
    message["usage"].update(delta["usage"])
    held_to(MessageAnswer, message)
    return message


async def test_a_message_is_answered_whole_and_streamed(http: Edge) -> None:
    node = await http.cell.deployed()
    response = await send(http, max_tokens=4)
    request_id = orders(node)[-1].request_id
    whole = response.json()
    held_to(MessageAnswer, whole)
    assert response.headers["request-id"] == response.headers["x-request-id"] == request_id
    assert (whole["id"], whole["model"]) == (f"msg-{request_id}", "chat")
    assert whole["content"] == [{"type": "text", "text": "aaaa"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    prompt = len("<user>hi<assistant>")
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == prompt
    assert whole["usage"]["output_tokens"] == 4
    told = await streamed(http, max_tokens=4)
    assert sum(one["type"] == "content_block_delta" for one in told) == 4
    again = rebuilt(told)
    assert {**again, "id": whole["id"], "usage": {}} == {**whole, "usage": {}}
    assert again["usage"]["output_tokens"] == 4


async def test_the_template_is_given_the_conversation(http: Edge) -> None:
    node = await calling(http, "It rains.")
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    rain = [{"type": "text", "text": "rain"}]
    await answered(
        http,
        system=[
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    use,
                ],
            },
            {
                "role": "user",
                "content": [{**result, "content": rain, "is_error": False}, *rain],
            },
        ],
        tools=[TOOL],
        metadata={"user_id": "x"},
        top_k=5,
        top_p=0.5,
        temperature=0.25,
        stop_sequences=["x", "y"],
    )
    (order,) = orders(node)
    assert len(order.prompt_tokens) == len(
        "<tool_call> weather<system>Be\nbrief.<user>a\nb<assistant>I look.toolu_1Bern"
        "<tool>raintoolu_1<user>rain<assistant>"
    )
    sampling = order.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (5, 0.5, 0.25)
    assert (sampling.stop, sampling.max_tokens) == (("x", "y"), 200)
    assert sampling.grammar is None


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_words_and_calls_are_blocks(http: Edge, stream: bool) -> None:
    await thinking(http, f"<think>Well.</think>I look.\n{CALL}\n{CALL}")
    asked = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = rebuilt(await streamed(http, **asked)) if stream else await answered(http, **asked)
    thought, words, first, second = message["content"]
    assert thought == {"type": "thinking", "thinking": "Well.", "signature": message["id"]}
    assert words == {"type": "text", "text": "I look."}
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    for call in (first, second):
        assert (call["name"], call["input"]) == ("weather", {"city": "Bern"})
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_a_call_that_was_cut_is_told_as_far_as_it_came(http: Edge) -> None:
    node = await calling(http, CALL)
    node.says = CALL[: CALL.index("rn")]
    message = await answered(http, tools=[TOOL])
    assert message["content"][0]["input"] == {"city": "Be"}


@pytest.mark.parametrize(
    ("given", "thinks"),
    [({}, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True)],
)
async def test_a_model_thinks_if_asked_to(http: Edge, given: dict[str, Any], thinks: bool) -> None:
    node = await thinking(http, "Yes.", QWEN)
    await answered(http, **({"thinking": given} if given else {}))
    (order,) = orders(node)
    closed = "" if thinks else "<think>\n\n</think>\n\n"
    assert len(order.prompt_tokens) == len("<user>hi<assistant>" + closed)


async def test_required_calls_and_formats_become_grammars(http: Edge) -> None:
    node = await calling(http, CALL)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for asked in (
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}},
    ):
        await answered(http, **asked)
    grammars = [order.sampling.grammar for order in orders(node)]
    kinds = [None if grammar is None else grammar.kind for grammar in grammars]
    assert kinds == [GrammarKind.LARK, GrammarKind.LARK, None, GrammarKind.JSON_SCHEMA]


def stopped(text: str, *, stop: tuple[str, ...], reason: FinishReason, tokens: int) -> Any:
    """How a writer tells the end of an answer whose tokens spell `text`, a token a character."""
    asked = Invocation(deployment=SPEC.name, prompt=TextPrompt(text="x"), max_tokens=9, stop=stop)
    writer = MessageWriter(AnswerTo(asked=asked, bytes_of=lambda token: chr(token).encode()))
    part = Tokens(first_index=0, token_ids=tuple(map(ord, text)), text="")
    end = Finished(reason=reason, prompt_tokens=1, output_tokens=tokens, ttft_s=1.0, tpot_s=0.0)
    told = json.loads(writer.whole([[part]], [end]))
    return told["stop_reason"], told["stop_sequence"]


@pytest.mark.parametrize(
    ("text", "stop", "told"),
    [
        ("say END of", ("STOP", "END"), ("stop_sequence", "END")),
        ("abcd", ("abcd", "bc"), ("stop_sequence", "bc")),
        ("say<|im_end|>", ("END",), ("end_turn", None)),
        ("say", (), ("end_turn", None)),
    ],
)
def test_the_stop_sequence_that_came_first_is_named(text: str, stop: Any, told: Any) -> None:
    assert stopped(text, stop=stop, reason=FinishReason.STOP, tokens=3) == told


def test_an_answer_that_the_context_has_cut_says_so() -> None:
    ends = [
        stopped("aaa", stop=("END",), reason=FinishReason.LENGTH, tokens=tokens)
        for tokens in (3, 9)
    ]
    assert ends == [("model_context_window_exceeded", None), ("max_tokens", None)]


async def test_tokens_are_counted_as_they_would_be_asked(http: Edge) -> None:
    node = await calling(http, "yes")
    asked = {"messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
    response = await http.post("/v1/messages/count_tokens", {"model": "chat", **asked})
    assert response.status_code == 200, response.text
    held_to(TokenCount, response.json())
    await answered(http, **asked)
    (order,) = orders(node)
    assert response.json() == {"input_tokens": len(order.prompt_tokens)}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}],
                }
            ]
        },
        "'image'",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": "I am"}]}, "cannot be continued"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "a block of type thinking cannot be in a message of the role user",
    ),
    ({"tools": [{"type": "web_search_20260318", "name": "x"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "two tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL]}, "calls no tools"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"stop_sequences": ["x"] * 17}, "stop"),
    ({"n": 1}, "unknown member n"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt is too long"),
)


async def test_wrong_bodies_are_refused(http: Edge) -> None:
    await http.cell.deployed()
    for body, named in WRONG:
        response = await send(http, **body)
        error = error_of(response)
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert named in error["message"], body


async def test_errors_before_the_endpoint_have_the_same_shape(http: Edge) -> None:
    await http.cell.deployed()
    missing = await send(http, model="chta")
    assert (missing.status_code, error_of(missing)["type"]) == (404, "not_found_error")
    assert "did you mean chat?" in error_of(missing)["message"]
    for response, status, kind in (
        (await http.get("/v1/messages"), 405, "invalid_request_error"),
        (await http.post("/v1/messages/batches", {}), 404, "not_found_error"),
        (await http.post("/v1/messages", b"{"), 400, "invalid_request_error"),
        (
            await http.post("/v1/messages", b"[%b]" % (b" " * BODY_BYTES_MAX)),
            413,
            "request_too_large",
        ),
        (
            await http.post("/v1/messages", b"{}", headers={"Content-Type": "text/plain"}),
            415,
            "invalid_request_error",
        ),
    ):
        assert (response.status_code, error_of(response)["type"]) == (status, kind)


async def test_a_full_cell_says_when_to_come_again(tmp_path: Path) -> None:
    async with edge(tmp_path, gateway=GatewayLimits(calls_max=0)) as http:
        await http.cell.deployed()
        full = await send(http)
        assert (full.status_code, error_of(full)["type"]) == (429, "rate_limit_error")
        assert full.headers["retry-after"] == "1"


async def test_a_cell_without_a_node_is_overloaded(tmp_path: Path) -> None:
    async with edge(tmp_path, limits=QUICK) as http:
        node = await http.cell.deployed()
        await node.leave()
        await http.cell.until(lambda: not http.cell.client.nodes())
        gone = await send(http)
        assert (gone.status_code, error_of(gone)["type"]) == (529, "overloaded_error")
        assert int(gone.headers["retry-after"]) > 0


async def test_a_failure_amid_a_stream_is_an_error_event(http: Edge) -> None:
    node = await http.cell.deployed(held=True)
    asked = asyncio.create_task(send(http, stream=True))
    order = (await node.told(SubmitRequest)).order
    await node.answer(order, 0, 1, last=False)
    await http.cell.until(lambda: http.cell.client.requests()[0].output_tokens == 1)
    await http.cell.ask(http.cell.client.cancel, order.request.request_id)
    *_, last = events(await asked)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == order.request.request_id
