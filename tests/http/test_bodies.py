"""Whatever a body holds, it is read as invocations or refused by name: nothing else comes of it."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.domain.invocation import ChatPrompt
from mesh.domain.text import ToolFormat
from mesh.http.asking import NOT_BUILT, invocations, with_tools
from mesh.http.bodies import CONTAINERS_MAX, Body, ChatBody, CompletionBody, read
from mesh.http.members import ROWS
from mesh.http.messages import MessagesBody
from mesh.http.ollama import GenerateBody
from mesh.http.responses import ResponsesBody
from scripts.gen_members import BODIES, TARGET, members, page, untold

GOOD: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionBody: {"model": "m", "prompt": "x"},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KINDS = st.sampled_from([ChatBody, CompletionBody])


@given(kind=KINDS, data=st.data())
def test_any_member_may_hold_anything(kind: type[Body], data: st.DataObject) -> None:
    members = st.sampled_from(sorted(kind.model_fields))
    changed = data.draw(st.dictionaries(members, ANYTHING, min_size=1, max_size=3))
    with suppress(InvalidInput):
        for asked in invocations(read(kind, json.dumps({**GOOD[kind], **changed}).encode())):
            assert asked.deployment


@given(kind=KINDS, data=st.data())
def test_any_bytes_are_read_or_refused(kind: type[Body], data: st.DataObject) -> None:
    raw = bytearray(json.dumps(GOOD[kind]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with suppress(InvalidInput):
        invocations(read(kind, bytes(raw)))


@pytest.mark.parametrize("field", sorted(NOT_BUILT))
def test_what_is_not_built_is_a_member_and_may_ask_for_nothing(field: str) -> None:
    """And what asks for something is refused by its name, wherever it is one. For members of
    other bodies alone see `test_messages`, `test_responses` and `test_ollama`.
    """
    kinds = [kind for kind in GOOD if field in kind.model_fields]
    others = (MessagesBody, ResponsesBody, GenerateBody)
    assert kinds or any(field in other.model_fields for other in others)
    for kind in kinds:
        for nothing in (None, *NOT_BUILT[field]):
            with suppress(InvalidInput):  # the other protocol's type
                body = read(kind, json.dumps({**GOOD[kind], field: nothing}).encode())
                assert len(invocations(body)) == 1
        wanted = (2, True, {"1": 2}, ["a"], "high")
        for something in (one for one in wanted if one not in NOT_BUILT[field]):
            given_ = json.dumps({**GOOD[kind], field: something}).encode()
            with pytest.raises(InvalidInput) as caught:
                invocations(read(kind, given_))
            assert caught.value.field.split(".")[0] == field


def test_what_a_client_has_read_of_an_answer_comes_back_with_it() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "1", "type": "function", "function": function}
    message: dict[str, object] = {
        "role": "assistant",
        "content": "{}",
        "parsed": {},
        "provider_specific_fields": None,
        "annotations": [{"type": "url_citation"}],
        "citations": ["https://example.org"],
        "id": "msg_1",
        "audio": None,
        "function_call": None,
        "refusal": None,
        "nobody_knows_it": None,
    }
    body = {"model": "m", "messages": [{**message, "tool_calls": [call]}]}
    assert read(ChatBody, json.dumps(body).encode()).messages[0].content == "{}"


def test_what_only_describes_is_ignored_and_what_was_said_is_kept() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "arguments": "{}", "provider_specific_fields": None}
    call = {"id": "1", "type": "function", "function": function, "provider_specific_fields": {}}
    parts = [{"type": "text", "text": "a", **mark}, {"type": "refusal", "refusal": "b", **mark}]
    messages = [
        {"role": "user", "content": parts, **mark},
        {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call]},
        {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "c"},
    ]
    tool = {"type": "function", "function": {"name": "f", **mark}, **mark}
    body = read(
        ChatBody, json.dumps({"model": "m", "messages": messages, "tools": [tool]}).encode()
    )
    (asked,) = invocations(body)
    assert isinstance(asked.prompt, ChatPrompt)
    told = [(one.content, one.reasoning_content) for one in asked.prompt.messages]
    assert told == [("ab", ""), ("", "why"), ("no", "c")]
    offered = with_tools(asked, body, ToolFormat.HERMES, by_tokens=False).prompt
    assert isinstance(offered, ChatPrompt)
    assert json.loads(offered.tools) == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "refusal"}, "refusal"),
        ({"type": "text"}, "text"),
        ({"type": "image_url", "text": "x"}, "type"),
        ({"type": "text", "text": "x", "detail": "high"}, "detail"),
        ({"type": "text", "text": 1}, "text"),
    ],
)
def test_a_part_that_is_wrong_is_named(part: dict[str, object], field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(InvalidInput) as caught:
        read(ChatBody, json.dumps(body).encode())
    assert caught.value.field == f"messages[0].content[0].{field}"


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": "x"}] * CONTAINERS_MAX},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}]},
        {"chat_template_kwargs": {"a": [[[]]] * 10_000}},
        {"tools": [{}] * 20_000},
    ],
)
def test_a_body_of_too_many_parts_is_refused_before_they_are_checked(more: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **more}
    with pytest.raises(InvalidInput, match=f"more than {CONTAINERS_MAX} lists and objects"):
        read(ChatBody, json.dumps(body).encode())


def test_a_long_conversation_with_tools_is_no_such_body() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ] * 1000
    body = {"model": "m", "messages": turns}
    assert len(read(ChatBody, json.dumps(body).encode()).messages) == 3000


def test_the_table_of_members_has_each_once_and_its_page_is_current() -> None:
    for protocol in BODIES:
        assert untold(protocol)[2] == [], protocol
        named = [name for row in ROWS for name in row.of(protocol)]
        assert sorted(set(named)) == sorted(named), protocol
        assert set(named) <= {name for name, _, _ in members(protocol)}, protocol
    assert TARGET.read_text(encoding="utf-8") == page(), "run python scripts/gen_members.py"
