"""Tools over HTTP: what a template is given, how calls are told, and calls that are required."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.grammar import GrammarKind
from mesh.domain.messages import SubmitRequest
from mesh.domain.text import ToolFormat
from mesh.http.answers import ChatChunk, ChatCompletion
from tests.controller.live import ASSETS, SPEC, FakeNode
from tests.http.edge import HELLO, Edge, events
from tests.http.test_answers import held_to

TEMPLATE = (
    "{% if tools %}<tool_call> {% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments.city }}{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}<assistant>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


async def calling(http: Edge, says: str) -> FakeNode:
    """A deployment whose model knows tools as Qwen does, and answers so."""
    node = await http.cell.node()
    node.text, node.says = replace(ASSETS, chat_template=TEMPLATE), says
    assert (await asyncio.to_thread(http.cell.client.deploy, SPEC)).message == "deployed"
    return node


def orders(node: FakeNode) -> list[Any]:
    return [c.order.request for c in node.commands if isinstance(c, SubmitRequest)]


async def test_a_call_is_told_whole(http: Edge) -> None:
    node = await calling(http, f"I look.\n{CALL}")
    response = await http.chat(tools=[TOOL], max_tokens=100)
    assert response.status_code == 200, response.text
    answer = response.json()
    held_to(ChatCompletion, answer)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    (order,) = orders(node)
    assert len(order.prompt_tokens) == len("<tool_call> weather<user>hi<assistant>")
    assert order.sampling.grammar is None


async def test_a_call_is_streamed_name_first_and_its_arguments_in_pieces(http: Edge) -> None:
    await calling(http, f"{CALL}\n{CALL}")
    response = await http.chat(tools=[TOOL], max_tokens=200, stream=True)
    *chunks, done = events(response)
    assert done == "[DONE]"
    for chunk in chunks:
        held_to(ChatChunk, chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    told = [one for delta in deltas for one in delta.get("tool_calls", [])]
    begun = [one for one in told if "id" in one]
    assert [(one["index"], one["function"]["name"]) for one in begun] == [
        (0, "weather"),
        (1, "weather"),
    ]
    assert len({one["id"] for one in begun}) == 2
    for index in (0, 1):
        pieces = [one["function"]["arguments"] for one in told if one["index"] == index]
        assert len(pieces) > 3
        assert json.loads("".join(pieces)) == {"city": "Bern"}
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_words_without_a_call_are_an_answer_like_others(http: Edge, stream: bool) -> None:
    await calling(http, "a < b, <tool_cal")
    response = await http.chat(tools=[TOOL], max_tokens=100, stream=stream)
    if stream:
        *chunks, _ = events(response)
        said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        said, finish = choice["message"]["content"], choice["finish_reason"]
    assert (said, finish) == ("a < b, <tool_cal", "stop")


async def test_calls_and_their_results_go_back_to_the_template(http: Edge) -> None:
    node = await calling(http, "It rains.")
    called = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    await http.chat(messages=messages, tools=[TOOL], tool_choice="none", max_tokens=20)
    (order,) = orders(node)
    rendered = "<user>hi<assistant>call_1Bern<tool>raincall_1<assistant>"
    assert len(order.prompt_tokens) == len(rendered), "and no tools, since none is to be called"


CUT = (
    # Arguments as they came, and what the two templates make of them.
    ('{"city": "Bern", "days": 2}', "city=Bern;days=2;", "city=Bern;days=2;"),
    ('{"city": "B", "days', '"{\\"city\\": \\"B\\", \\"days"', "city=B;"),
    ('{"city": "K', '"{\\"city\\": \\"K"', "city=K;"),
    ('["K"]', '"[\\"K\\"]"', ""),
    ('{"city": "\\ud800"}', '"{\\"city\\": \\"\\\\ud800\\"}"', ""),
    ("no JSON", '"no JSON"', ""),
    ("", "", ""),
)


@pytest.mark.parametrize("objects", [False, True])
async def test_a_call_that_was_cut_goes_back_to_templates_of_either_kind(
    http: Edge, objects: bool
) -> None:
    """One that writes arguments of any type as JSON, and one that takes objects alone."""
    listed = "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}"
    either = "{% if a is string %}{{ a | tojson }}{% else %}" + listed + "{% endif %}"
    wrap = "<tool_call>{% for c in messages[0].tool_calls %}{% set a = c.function.arguments %}"
    node = await http.cell.node()
    body = listed if objects else either
    node.text = replace(ASSETS, chat_template=wrap + body + "{% endfor %}")
    assert (await asyncio.to_thread(http.cell.client.deploy, SPEC)).message == "deployed"
    for arguments, plain, items in CUT:
        function = {"name": "weather", "arguments": arguments}
        called = {"id": "1", "type": "function", "function": function}
        messages = [{"role": "assistant", "content": None, "tool_calls": [called]}]
        answer = await http.chat(messages=messages, max_tokens=1)
        assert answer.status_code == 200, answer.text
        rendered = "<tool_call>" + (items if objects else plain)
        assert len(orders(node)[-1].prompt_tokens) == len(rendered), arguments


async def test_a_call_that_is_required_is_kept_to_by_a_grammar(http: Edge) -> None:
    node = await calling(http, CALL)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        response = await http.chat(tools=[TOOL], tool_choice=choice, max_tokens=100)
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        grammar = orders(node)[-1].sampling.grammar
        assert grammar.kind is GrammarKind.LARK
        assert '"const": "weather"' in grammar.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_that_is_cut_is_nobodys_words(http: Edge, stream: bool) -> None:
    node = await calling(http, "")
    two = f'{CALL}\n<tool_call>\n{{"name": "wea'
    for says in ("<tool_c", '<tool_call>\n{"na', two, CALL[:-20]):
        node.says = says
        asked = {"tools": [TOOL], "tool_choice": "required", "max_tokens": len(says)}
        response = await http.chat(**asked, stream=stream)
        if stream:
            *chunks, _ = events(response)
            told = [chunk["choices"][0]["delta"] for chunk in chunks]
            calls = sum("id" in one for delta in told for one in delta.get("tool_calls", []))
            content = "".join(delta.get("content") or "" for delta in told)
        else:
            message = response.json()["choices"][0]["message"]
            content, calls = message["content"], len(message["tool_calls"] or [])
        assert not content
        assert calls == says.count('"weather"'), says


async def test_a_schema_that_cannot_be_kept_to_is_named(http: Edge) -> None:
    await calling(http, CALL)
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "odd"}}}
    response = await http.chat(tools=[wrong], tool_choice="required", max_tokens=100)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


async def test_what_no_call_can_be_kept_to_is_refused_where_the_tool_is_strict(http: Edge) -> None:
    await calling(http, CALL)
    cities = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    parameters = {"type": "object", "properties": {"cities": cities}}
    for strict in (None, False, True):
        function = {"name": "weather", "parameters": parameters, "strict": strict}
        tool = {"type": "function", "function": function}
        response = await http.chat(tools=[tool], tool_choice="required", max_tokens=100)
        assert response.status_code == (400 if strict else 200), response.text
        assert ("uniqueItems" in response.text) is bool(strict)


async def test_a_manifest_says_how_its_model_calls_tools(http: Edge) -> None:
    """One whose template has other words for it."""
    node = await http.cell.node()
    node.text, node.says = (
        replace(ASSETS, chat_template=TEMPLATE.replace("tool_call", "call")),
        CALL,
    )
    spec = replace(SPEC, tool_format=ToolFormat.HERMES)
    assert await asyncio.to_thread(http.cell.client.deploy, replace(spec, tool_format=None))
    assert (await http.chat(tools=[TOOL])).status_code == 400
    assert await asyncio.to_thread(http.cell.client.deploy, spec)
    answer = (await http.chat(tools=[TOOL], max_tokens=100)).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    spec = replace(spec, tool_format=ToolFormat.NONE)
    assert await asyncio.to_thread(http.cell.client.deploy, spec)
    assert (await http.chat(tools=[TOOL])).status_code == 400
