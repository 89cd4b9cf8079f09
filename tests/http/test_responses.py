"""OpenAI's Responses over HTTP: what a template is given, what is kept for whom, errors."""

import json
from typing import Any

import pytest
import requests

from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.errors import InvalidInput
from mesh.domain.grammar import GrammarKind
from mesh.domain.messages import SubmitRequest
from mesh.http.answers import ErrorBody
from mesh.http.exchange import BODY_BYTES_MAX
from mesh.http.kept_responses import CONTINUED_MAX, KEPT_S_MAX, KeptResponses
from mesh.http.response_answers import DeletedResponse, ResponseAnswer
from mesh.wire import access
from tests.http.edge import Edge, events
from tests.http.test_answers import held_to
from tests.http.test_thoughts import QWEN, thinking
from tests.http.test_tools import CALL, calling, orders

BASE: dict[str, Any] = {"model": "chat", "max_output_tokens": 200, "input": "hi"}
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


STRICT = {
    "type": "json_schema",
    "name": "cities",
    "schema": {"type": "array", "uniqueItems": True},
}


async def send(http: Edge, **body: Any) -> requests.Response:
    return await http.post("/v1/responses", {**BASE, **body})


async def answered(http: Edge, **body: Any) -> dict[str, Any]:
    response = await send(http, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    held_to(ResponseAnswer, answer)
    return answer


async def test_the_template_is_given_the_items(http: Edge) -> None:
    node = await calling(http, "It rains.")
    call: dict[str, Any] = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "weather",
        "arguments": '{"city": "Bern"}',
        "status": "completed",
    }
    call |= {"parsed_arguments": {"city": "Bern"}, "created_by": "x"}
    said = {"type": "output_text", "text": "I look.", "annotations": [], "parsed": {"a": 1}}
    await answered(
        http,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "message", "id": "msg_1", "role": "assistant", "content": [said]},
            call,
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            {"role": "developer", "content": "b"},
        ],
        tools=[TOOL],
        temperature=0.25,
        top_p=0.5,
        metadata={"a": "b"},
        prompt_cache_key="x",
    )
    (order,) = orders(node)
    assert len(order.prompt_tokens) == len(
        "<tool_call> weather<system>Be brief.<user>a<assistant>I look.call_1Bern"
        "<tool>raincall_1<system>b<assistant>"
    )
    sampling = order.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.5, 200)


@pytest.mark.parametrize("effort", [None, "none", "high"])
async def test_a_model_thinks_unless_it_is_told_not_to(http: Edge, effort: str | None) -> None:
    node = await thinking(http, "Yes.", QWEN)
    await answered(http, reasoning={"effort": effort, "summary": "auto"})
    (order,) = orders(node)
    closed = "<think>\n\n</think>\n\n" if effort == "none" else ""
    assert len(order.prompt_tokens) == len("<user>hi<assistant>" + closed)


async def test_required_calls_and_formats_become_grammars(http: Edge) -> None:
    node = await calling(http, CALL)
    other = {**TOOL, "name": "time"}
    named = {"type": "function", "name": "weather"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for asked in (
        {"tools": [TOOL, other], "tool_choice": "required"},
        {"tools": [TOOL, other], "tool_choice": named},
        {"tools": [TOOL, other], "tool_choice": allowed},
        {"tools": [TOOL], "tool_choice": "none"},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    ):
        await answered(http, **asked)
    grammars = [order.sampling.grammar for order in orders(node)]
    kinds = [None if grammar is None else grammar.kind for grammar in grammars]
    lark = GrammarKind.LARK
    assert kinds == [lark, lark, lark, None, GrammarKind.JSON_SCHEMA, None]
    assert "time" in grammars[0].text
    assert "time" not in grammars[2].text


async def test_a_stream_ends_with_what_is_answered_whole(http: Edge) -> None:
    await thinking(http, f"<think>Well.</think>I look.\n{CALL}\n{CALL}")
    whole = await answered(http, tools=[TOOL], store=False)
    response = await send(http, tools=[TOOL], stream=True, store=False)
    told = list(events(response))
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    assert names == [one["type"] for one in told]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    last = told[-1]["response"]
    held_to(ResponseAnswer, last)
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert last["output"] == done

    def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**item, "id": "", "call_id": ""} for item in output]

    assert plain(last["output"]) == plain(whole["output"])
    calls = [item for item in done if item["type"] == "function_call"]
    assert len({call["call_id"] for call in calls}) == len(calls) == 2
    for item in done:
        kind = {"message": "output_text", "reasoning": "reasoning_text"}.get(item["type"])
        delta = f"response.{kind or 'function_call_arguments'}.delta"
        grown = "".join(
            one["delta"] for one in told if one["type"] == delta and one["item_id"] == item["id"]
        )
        assert grown == (item["content"][0]["text"] if kind else item["arguments"])


async def test_an_answer_is_continued_found_and_forgotten(http: Edge) -> None:
    node = await http.cell.deployed()
    first = await answered(http, max_output_tokens=2, instructions="Be brief.")
    second = await answered(http, previous_response_id=first["id"], max_output_tokens=2)
    assert second["previous_response_id"] == first["id"]
    hi = {"role": "user", "content": "hi"}
    await answered(http, input=[hi, {"id": first["output"][0]["id"]}, hi])
    _, continued, referred = orders(node)
    prompt = "<user>hi<assistant>aa<user>hi<assistant>"
    assert len(continued.prompt_tokens) == len(referred.prompt_tokens) == len(prompt)
    found = await http.get(f"/v1/responses/{first['id']}")
    assert found.json() == first

    path = f"/v1/responses/{first['id']}"
    held_to(DeletedResponse, (await http.delete(path)).json())
    for gone in (await http.delete(path), await http.get(path)):
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    broken = await send(http, previous_response_id=second["id"])
    assert broken.json()["error"]["param"] == "previous_response_id"
    unkept = await answered(http, store=False)
    assert (await http.get(f"/v1/responses/{unkept['id']}")).status_code == 404


WEB = {"type": "web_search_call", "id": "ws_1", "status": "completed"}


ENDLESS = {"type": "json_schema", "name": "e", "schema": {"$ref": "#"}}


WRONG: tuple[tuple[dict[str, Any], str | None, str], ...] = (
    ({"input": None}, "input", "input"),
    ({"input": []}, "input", "messages"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"text": {"format": ENDLESS}}, "text.format", "can ever end"),
    ({"input": [WEB]}, "input[0]", "function_call_output"),
    ({"input": [{"id": "msg_r0-1_0"}]}, "input", "not found"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "input_image"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "file_search"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_"),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "x"}],
            },
        },
        "tool_choice",
        "'x'",
    ),
    ({"tools": [TOOL]}, "tools", "calls no tools"),
    ({"conversation": "conv_1"}, "conversation", "conversation"),
    ({"prompt": {"id": "x"}}, "prompt", "prompt"),
    ({"background": True, "store": False}, "store", "is kept"),
    ({"truncation": "auto"}, "truncation", "truncation"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "schema"),
    ({"text": {"format": {**STRICT, "strict": True}}}, None, "uniqueItems"),
    ({"input": [{"id": f"msg_r{n}_0"} for n in range(129)]}, "input", "129 item references"),
    ({"n": 2}, "n", "unknown member n"),
    ({"input": "x" * 600}, None, "maximum context length"),
)


async def test_what_is_wrong_is_refused_by_name(http: Edge) -> None:
    await http.cell.deployed()
    for body, param, named in WRONG:
        response = await send(http, **body)
        told = response.json()
        held_to(ErrorBody, told)
        assert response.status_code == 400, body
        assert named in told["error"]["message"], told
        assert param in (None, told["error"]["param"]), body


async def until(http: Edge, id_: str, status: str) -> dict[str, Any]:
    while True:
        answer: dict[str, Any] = (await http.get(f"/v1/responses/{id_}")).json()
        if answer["status"] == status:
            return answer
        assert answer["status"] in ("queued", "in_progress"), answer


async def test_a_response_in_the_background_is_asked_for_and_followed_from_any_event(
    http: Edge,
) -> None:
    node = await http.cell.deployed(held=True)
    begun = await answered(http, background=True, max_output_tokens=3)
    assert (begun["status"], begun["background"]) == ("queued", True)
    path = f"/v1/responses/{begun['id']}"
    assert (await http.get(path)).json() == begun
    await http.cell.until(lambda: bool(orders(node)))
    (order,) = [c.order for c in node.commands if isinstance(c, SubmitRequest)]
    await node.answer(order, 0, 3, last=True)
    node.held = False
    ended = await until(http, begun["id"], "incomplete")
    held_to(ResponseAnswer, ended)
    assert ended["output"][0]["content"][0]["text"] == "aaa"
    every = list(events(await http.get(f"{path}?stream=true")))
    assert [event["sequence_number"] for event in every] == list(range(len(every)))
    assert every[-1]["response"] == ended
    assert list(events(await http.get(f"{path}?stream=true&starting_after=3"))) == every[4:]
    wrong = await http.get(f"{path}?stream=true&starting_after=x")
    assert wrong.json()["error"]["param"] == "starting_after"
    assert (await http.post(f"{path}/cancel", {})).json() == ended, "it has ended already"
    further = await answered(http, previous_response_id=begun["id"], max_output_tokens=1)
    assert further["previous_response_id"] == begun["id"]
    assert (await http.delete(path)).status_code == 200
    assert (await http.get(f"{path}?stream=true")).status_code == 400


async def test_a_response_in_the_background_is_cancelled_and_frees_its_place(http: Edge) -> None:
    node = await http.cell.deployed(held=True)
    begun = await answered(http, background=True)
    await http.cell.until(lambda: bool(orders(node)))
    path = f"/v1/responses/{begun['id']}"
    told = (await http.post(f"{path}/cancel", {})).json()
    held_to(ResponseAnswer, told)
    assert told["status"] == "cancelled"
    assert (await http.get(path)).json() == told
    await http.cell.idle()
    assert list(events(await http.get(f"{path}?stream=true"))) == []


async def test_a_response_in_the_background_that_is_refused_has_failed(http: Edge) -> None:
    missing = await send(http, background=True, model="chta")
    assert missing.status_code == 404
    await http.cell.deployed()
    begun = await answered(http, background=True, input="x" * 600)
    failed = await until(http, begun["id"], "failed")
    assert "maximum context length" in failed["error"]["message"]
    assert failed["error"]["code"] == "invalid_prompt"
    for wrong in ({"temperature": -1.0}, {"service_tier": "gold"}):
        refused = await send(http, background=True, **wrong)
        (member,) = wrong
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, member)
    followed = await send(http, background=True, stream=True, input="x" * 600)
    (last,) = events(followed)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kept answers, with a clock and a caller to set."""

    class Book(KeptResponses):
        def __init__(self, **limits: int) -> None:
            self.at_s = 0.0
            super().__init__(lambda: self.at_s, **limits)

        def of(self, tenant: str) -> "Book":
            one = Caller(role=Role.TENANT, tenant=TenantName(tenant))
            access._CALLER.set(one)
            return self

        def add(self, id_: str, previous: str | None = None, said: Any = ("x",)) -> None:
            answer = {"id": id_, "output": [{"id": f"msg_{id_[5:]}_0"}]}
            self.keep(answer, said=json.dumps(said).encode(), previous=previous)

    token = access._CALLER.set(Caller())
    yield Book
    access._CALLER.reset(token)


def test_an_answer_is_its_tenants_alone_for_an_hour_after_its_last_use(kept: Any) -> None:
    book = kept()
    book.of("a").add("resp_1")
    book.add("resp_2", "resp_1")
    assert book.conversation("resp_2") == ["x", {"id": "msg_1_0"}, "x", {"id": "msg_2_0"}]
    assert book.item("msg_1_0") == {"id": "msg_1_0"}
    for wrong in (book.of("b").conversation, lambda _: book.item("msg_1_0")):
        with pytest.raises(InvalidInput, match="not found"):
            wrong("resp_2")
    assert book.get("resp_1") is None
    book.at_s = KEPT_S_MAX - 1
    assert book.of("a").get("resp_2")
    book.at_s = KEPT_S_MAX + 1
    assert book.get("resp_1") is None
    with pytest.raises(InvalidInput, match="resp_1"):
        book.conversation("resp_2")


def test_beyond_its_bytes_the_oldest_of_the_tenant_with_most_goes(kept: Any) -> None:
    book = kept(bytes_max=20_000)
    book.of("b").add("resp_0")
    for n in range(1, 100):
        book.of("a").add(f"resp_{n}")
    assert book.of("b").get("resp_0")
    assert book.of("a").get("resp_1") is None
    assert book.get("resp_99")
    assert sum(book._bytes.values()) <= 20_000


def test_a_conversation_has_a_bound(kept: Any) -> None:
    book = kept()
    for n in range(CONTINUED_MAX + 1):
        book.add(f"resp_{n}", f"resp_{n - 1}" if n else None, said=())
    assert len(book.conversation(f"resp_{CONTINUED_MAX - 1}")) == CONTINUED_MAX
    with pytest.raises(InvalidInput, match=f"the last of {CONTINUED_MAX}"):
        book.conversation(f"resp_{CONTINUED_MAX}")


def test_what_is_continued_has_no_log_probabilities_and_is_no_longer_than_a_body(kept: Any) -> None:
    book = kept()
    part = {"type": "output_text", "text": "x" * BODY_BYTES_MAX, "logprobs": [{"logprob": 0.0}]}
    answer = {"id": "resp_1", "output": [{"id": "msg_1_0", "content": [part]}]}
    book.keep(answer, said=b"[]", previous=None)
    assert book.item("msg_1_0")["content"][0]["logprobs"] == []
    assert json.loads(book.get("resp_1")) == answer
    with pytest.raises(InvalidInput, match="the conversation has"):
        book.conversation("resp_1")
