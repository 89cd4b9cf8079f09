"""Whatever a body holds, it is read as invocations or refused by name: nothing else comes of it."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.domain.errors import InvalidInput
from mesh.http.asking import NOT_BUILT, invocations
from mesh.http.bodies import Body, ChatBody, CompletionBody, read

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
@settings(max_examples=300, deadline=None)
def test_any_member_may_hold_anything(kind: type[Body], data: st.DataObject) -> None:
    members = st.sampled_from(sorted(kind.model_fields))
    changed = data.draw(st.dictionaries(members, ANYTHING, min_size=1, max_size=3))
    with suppress(InvalidInput):
        for asked in invocations(read(kind, json.dumps({**GOOD[kind], **changed}).encode())):
            assert asked.deployment


@given(kind=KINDS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(kind: type[Body], data: st.DataObject) -> None:
    raw = bytearray(json.dumps(GOOD[kind]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with suppress(InvalidInput):
        invocations(read(kind, bytes(raw)))


@pytest.mark.parametrize("field", sorted(NOT_BUILT))
def test_what_is_not_built_is_a_member_and_may_ask_for_nothing(field: str) -> None:
    """And what asks for something is refused by its name, wherever it is one."""
    kinds = [kind for kind in GOOD if field in kind.model_fields]
    assert kinds
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
    }
    body = {"model": "m", "messages": [{**message, "tool_calls": [call]}]}
    assert read(ChatBody, json.dumps(body).encode()).messages[0].content == "{}"
