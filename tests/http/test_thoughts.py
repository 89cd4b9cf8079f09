"""Thoughts over HTTP: beside the answer, whole and streamed, and before what keeps to a grammar."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.grammar import GrammarKind
from mesh.domain.messages import SubmitRequest
from mesh.http.answers import ChatChunk, ChatCompletion
from tests.controller.live import ASSETS, SPEC, FakeNode
from tests.http.edge import HELLO, Edge, events
from tests.http.test_answers import held_to
from tests.http.test_tools import CALL, TOOL

QWEN = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
R1 = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<assistant><think>\n"


async def thinking(http: Edge, says: str, template: str = QWEN) -> FakeNode:
    node = await http.cell.node()
    node.text, node.says = replace(ASSETS, chat_template=template), says
    assert (await asyncio.to_thread(http.cell.client.deploy, SPEC)).message == "deployed"
    return node


async def message_of(http: Edge, **body: Any) -> dict[str, Any]:
    response = await http.chat(max_tokens=200, **body)
    assert response.status_code == 200, response.text
    answer = response.json()
    held_to(ChatCompletion, answer)
    return {**answer["choices"][0]["message"], "usage": answer["usage"]}


@pytest.mark.parametrize(
    ("template", "says"), [(QWEN, "<think>\nWell.\n</think>\n\nYes."), (R1, "Well.</think> Yes.")]
)
async def test_a_thought_is_told_beside_the_answer(http: Edge, template: str, says: str) -> None:
    await thinking(http, says, template)
    message = await message_of(http)
    assert (message["reasoning_content"], message["content"]) == ("Well.", "Yes.")
    thought = message["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < message["usage"]["completion_tokens"]


async def test_a_thought_is_streamed_before_the_answer(http: Edge) -> None:
    await thinking(http, "<think>\nLet me see.\n</think>\n\nYes.")
    response = await http.chat(max_tokens=200, stream=True, stream_options={"include_usage": True})
    *chunks, done = events(response)
    assert done == "[DONE]"
    for chunk in chunks:
        held_to(ChatChunk, chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    thoughts = [n for n, delta in enumerate(deltas) if delta.get("reasoning_content")]
    words = [n for n, delta in enumerate(deltas) if delta.get("content")]
    assert "".join(deltas[n]["reasoning_content"] for n in thoughts) == "Let me see."
    assert "".join(deltas[n]["content"] for n in words) == "Yes."
    assert max(thoughts) < min(words)
    assert len(thoughts) > 1
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_a_model_that_is_told_not_to_think_has_no_thoughts(http: Edge) -> None:
    await thinking(http, "</think> is a mark.")
    message = await message_of(http, chat_template_kwargs={"enable_thinking": False})
    assert message["content"] == "</think> is a mark."
    assert "reasoning_content" not in message
    assert "completion_tokens_details" not in message["usage"]


async def test_a_thought_may_come_before_a_call(http: Edge) -> None:
    await thinking(http, f"<think>I look.</think>\n{CALL}")
    message = await message_of(http, tools=[TOOL])
    assert message["reasoning_content"] == "I look."
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "weather"


async def test_a_grammar_begins_after_the_thought(http: Edge) -> None:
    node = await thinking(http, "<think>I look.</think>yes")
    for wanted in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a/b"}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"tools": [TOOL], "tool_choice": "required"},
    ):
        await message_of(http, **wanted)
        orders = [c.order.request for c in node.commands if isinstance(c, SubmitRequest)]
        grammar = orders[-1].sampling.grammar
        assert grammar is not None, wanted
        assert grammar.kind is GrammarKind.LARK, wanted
        assert "</think>" in grammar.text.replace("\\", ""), wanted


async def test_a_grammar_that_cannot_be_kept_to_is_named_as_it_was_asked_for(http: Edge) -> None:
    await thinking(http, "<think>x</think>y")
    schema = {"type": "array", "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    response = await http.chat(response_format=wanted)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "json_schema cannot be kept to" in error["message"]
    assert "uniqueItems" in error["message"]


async def test_what_an_assistant_thought_is_given_to_the_template(http: Edge) -> None:
    node = await thinking(
        http, "Yes.", QWEN.replace("{% endfor", "{{ m.reasoning_content }}{% endfor", 1)
    )
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Well."}
    response = await http.chat(messages=[*HELLO, said, *HELLO], max_tokens=20)
    assert response.status_code == 200, response.text
    (order,) = [c.order.request for c in node.commands if isinstance(c, SubmitRequest)]
    assert len(order.prompt_tokens) == len("<user>hi<assistant>Yes.Well.<user>hi<assistant>")
