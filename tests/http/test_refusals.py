"""What becomes of a call that is not served: a status that clients act on, or an event."""

import asyncio
import gzip
import select
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests

from mesh.controller.gateway import GatewayLimits
from mesh.controller.keys import KeyBook
from mesh.controller.main import read_origin
from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.errors import InvalidInput, MeshError, Refused
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import RefusalReason
from mesh.http import exchange
from mesh.http.exchange import BODY_BYTES_MAX, UNREAD_BYTES_MAX, Bodies
from mesh.http.refusals import Failure, encoded, error_headers, in_openai, status_and_code
from mesh.http.server import HEAD_BYTES_MAX
from tests.controller.live import CLASSES, QUICK, SPEC, WAIT_S_MAX
from tests.http.edge import HELLO, Edge, edge, events, raw, read_all

GOOD: dict[str, Any] = {"model": "chat", "messages": HELLO}


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def error_of(response: requests.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def told_of(error: MeshError, *, status: int, code: str) -> Any:
    return in_openai(Failure(error=error, status=status, code=code))[1]["error"]


@pytest.mark.parametrize(
    ("retry_after_s", "headers"),
    [
        (1.25, {b"retry-after": b"2", b"retry-after-ms": b"1250"}),
        (0.0, {b"x-should-retry": b"false"}),
    ],
)
def test_a_refusal_says_when_to_come_again_or_not_to(
    retry_after_s: float, headers: dict[bytes, bytes]
) -> None:
    refused = Refused("full", reason=RefusalReason.QUEUE_FULL, retry_after_s=retry_after_s)
    why = {b"mesh-error": b"Refused", b"mesh-reason": b"queue_full"}
    assert dict(error_headers(refused)) == why | headers
    assert dict(error_headers(MeshError("a fault"))) == {b"mesh-error": b"MeshError"}
    stops = Refused("it stops", reason=RefusalReason.SHUTTING_DOWN)
    assert b"x-should-retry" not in dict(error_headers(stops)), "another may answer"
    body = told_of(refused, status=429, code="queue_full")
    assert (body["type"], body["code"], body["param"]) == ("rate_limit_error", "queue_full", None)
    assert body["hint"] == refused.hint


def test_the_field_is_the_param_and_types_follow_the_status() -> None:
    wrong = told_of(InvalidInput("no", field="top_p"), status=400, code="invalid_request")
    assert (wrong["type"], wrong["param"]) == ("invalid_request_error", "top_p")
    assert told_of(MeshError("no"), status=500, code="x")["type"] == "server_error"
    assert status_and_code(MeshError("no")) == (500, "internal_error")


async def test_a_prompt_too_long_is_told_in_the_words_that_clients_know(http: Edge) -> None:
    await http.cell.deployed()
    for prompt in ([1] * 600, "x" * (1 << 20)):
        response = await http.complete(prompt)
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is 512 tokens" in error["message"].lower()


async def test_limits_of_its_own_come_in_headers(http: Edge) -> None:
    node = await http.cell.deployed()
    body = {"model": "chat", "prompt": [1, 2, 3], "max_tokens": 2}
    served, wrong, negative = [
        await http.post("/v1/completions", body, headers=headers)
        for headers in (
            {"x-slo-ttft-ms": "60000", "X-SLO-TPOT-ms": "5000.5"},
            {"x-slo-ttft-ms": "soon"},
            {"x-slo-ttft-ms": "-1"},
        )
    ]
    assert served.status_code == 200
    submit = await node.told(SubmitRequest)
    assert (submit.order.slo.ttft_limit_s(9), submit.order.slo.tpot_s) == (60.0, 5.0005)
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "x-slo-ttft-ms")
    assert (negative.status_code, error_of(negative)["param"]) == (400, "x-slo-ttft-ms")


async def test_a_class_is_named_by_service_tier_or_a_header_and_told_back(http: Edge) -> None:
    await http.cell.deployed(CLASSES)
    body = {"model": "chat", "prompt": [1, 2, 3], "max_tokens": 2}
    tier = {**body, "service_tier": "batch"}
    answers = [
        await http.post("/v1/completions", tier),
        await http.post("/v1/completions", body, headers={"x-slo-class": "batch"}),
        await http.post("/v1/completions", {**body, "service_tier": "auto"}),
        await http.post("/v1/completions", {**body, "service_tier": "flex"}),
    ]
    tiers = [one.json()["service_tier"] for one in answers]
    assert tiers == ["batch", "batch", "chat", "chat"]
    streamed = await http.post("/v1/completions", {**tier, "stream": True})
    assert '"service_tier":"batch"' in streamed.text
    unknown = await http.post("/v1/completions", {**body, "service_tier": "gold"})
    assert (unknown.status_code, error_of(unknown)["param"]) == (400, "service_tier")
    header = await http.post("/v1/completions", body, headers={"x-slo-class": "gold"})
    assert (header.status_code, error_of(header)["param"]) == (400, "x-slo-class")
    long = await http.post("/v1/completions", {**body, "service_tier": "g" * 100_000})
    assert (long.status_code, len(long.content) < 1_000) == (400, True)
    whole = await http.post(
        "/v1/responses", {"model": "chat", "input": "hi", "service_tier": "batch"}
    )
    assert whole.json()["service_tier"] == "batch"


async def test_an_unknown_model_is_not_found_with_names_like_it(http: Edge) -> None:
    await http.cell.deployed()
    for response in (await http.chat(model="chta"), await http.get("/v1/models/chta")):
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["hint"]) == ("model_not_found", "did you mean chat?")


async def test_other_paths_and_methods_are_told_alike(http: Edge) -> None:
    assert error_of(await http.get("/v1/audio/speech"))["code"] == "not_found"
    assert error_of(await http.get("/v1/chat/completions"))["code"] == "method_not_allowed"


async def test_without_a_node_it_is_503_with_when_to_come_again(tmp_path: Path) -> None:
    async with edge(tmp_path, limits=QUICK) as http:
        node = await http.cell.deployed()
        await node.leave()
        await http.cell.until(lambda: not http.cell.client.nodes())
        response = await http.chat(stream=True)
        assert response.status_code == 503
        assert error_of(response)["code"] == "no_node"
        assert float(response.headers["retry-after-ms"]) > 0
        assert response.headers["x-request-id"] == "r1-1"


async def test_a_refusal_of_one_of_several_prompts_refuses_the_call(http: Edge) -> None:
    await http.cell.deployed(held=True)
    response = await http.complete([[1], [1] * 600], stream=True)
    assert error_of(response)["code"] == "context_length_exceeded"
    await http.cell.idle()


async def test_more_calls_than_the_limit_are_429(tmp_path: Path) -> None:
    async with edge(tmp_path, gateway=GatewayLimits(calls_max=1)) as http:
        node = await http.cell.deployed(held=True)
        first = asyncio.create_task(http.chat(max_tokens=1))
        order = (await node.told(SubmitRequest)).order
        second = await http.chat()
        assert (second.status_code, error_of(second)["code"]) == (429, "queue_full")
        assert second.headers["retry-after"] == "1"
        await node.answer(order, 0, 1, last=True)
        assert (await first).status_code == 200


@pytest.mark.own_cell
async def test_a_failure_after_the_first_token_is_an_event_and_no_done(http: Edge) -> None:
    node = await http.cell.deployed(held=True)
    asked = asyncio.create_task(http.chat(stream=True))
    order = (await node.told(SubmitRequest)).order
    await node.answer(order, 0, 2, last=False)
    await asyncio.sleep(0.1)
    http.cell.stop.set()
    response = await asked
    assert response.status_code == 200
    *chunks, error = events(response)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert error["error"]["code"] == "shutting_down"
    assert b"event: error\n" in response.content
    assert b"[DONE]" not in response.content


@pytest.mark.parametrize("prompt", [[1], [[1], [2]]])
async def test_what_an_operator_cancels_ends_with_a_status(http: Edge, prompt: Any) -> None:
    node = await http.cell.deployed(held=True)
    asked = asyncio.create_task(http.complete(prompt))
    order = (await node.told(SubmitRequest)).order
    await http.cell.ask(http.cell.client.cancel, order.request.request_id)
    response = await asked
    assert (response.status_code, error_of(response)["code"]) == (499, "cancelled")
    await http.cell.idle()


@pytest.mark.own_cell
async def test_a_stopping_controller_tells_those_who_wait(http: Edge) -> None:
    node = await http.cell.deployed(held=True)
    asked = asyncio.create_task(http.chat())
    await node.told(SubmitRequest)
    http.cell.stop.set()
    response = await asked
    assert (response.status_code, error_of(response)["code"]) == (503, "shutting_down")
    await http.cell.serving


BAD: Sequence[tuple[bytes | dict[str, Any], str, str | None]] = [
    (b"", "no valid JSON", None),
    (b"{", "no valid JSON", None),
    (b"[1]", "no JSON object", None),
    (b'{"model": "chat", "messages": [], "temperature": NaN}', "no valid JSON", None),
    (b'{"model": "chat", "messages": [], "temperature": 1e999}', "finite", "temperature"),
    (b'{"model": "\xff"}', "no valid JSON", None),
    (b'{"model": "\\ud800"}', "no valid JSON", None),
    (b"[" * 100_000, "no valid JSON", None),
    ({}, "lacks model", "model"),
    ({"model": "chat"}, "lacks messages", "messages"),
    ({**GOOD, "model": 1}, "valid string", "model"),
    ({**GOOD, "messages": "hi"}, "valid list", "messages"),
    ({**GOOD, "messages": []}, "no messages", "messages"),
    ({**GOOD, "messages": [{"content": "x"}]}, "lacks", "messages[0].role"),
    ({**GOOD, "messages": [{"role": "user", "content": 1}]}, "string", "messages[0].content"),
    (
        {**GOOD, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "'text'",
        "messages[0].content[0].type",
    ),
    (
        {**GOOD, "messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "lacks",
        "messages[0].tool_calls[0].function",
    ),
    ({**GOOD, "tools": [tool("f")]}, "calls no tools", "tools"),
    ({**GOOD, "tools": [tool("f"), tool("f")]}, "two tools are called 'f'", "tools"),
    ({**GOOD, "tools": [tool("a b")]}, "match pattern", "tools[0].function.name"),
    ({**GOOD, "tools": [tool(f"f{n}") for n in range(129)]}, "at most 128", "tools"),
    ({**GOOD, "tools": [{"type": "function", "function": {}}]}, "lacks", "tools[0].function.name"),
    ({**GOOD, "tool_choice": "required"}, "there are no tools", "tool_choice"),
    (
        {**GOOD, "tools": [tool("f")], "tool_choice": {**tool("g")}},
        "none of the tools",
        "tool_choice",
    ),
    ({**GOOD, "temperature": "1"}, "valid number", "temperature"),
    ({**GOOD, "temperature": -1}, "temperature is -1", "temperature"),
    ({**GOOD, "top_p": -0.1}, "top_p is -0.1", "top_p"),
    ({**GOOD, "top_p": 0, "temperature": -1}, "temperature is -1", "temperature"),
    ({**GOOD, "top_k": 1 << 32}, "top_k is 4294967296", "top_k"),
    ({**GOOD, "max_tokens": 0}, "max_tokens is 0", "max_tokens"),
    ({**GOOD, "max_tokens": True}, "valid integer", "max_tokens"),
    ({**GOOD, "seed": 1 << 70}, "seed is", "seed"),
    ({**GOOD, "seed": 1 << 63}, "seed is", "seed"),
    ({**GOOD, "seed": -(1 << 63) - 1}, "seed is", "seed"),
    ({**GOOD, "stop": ["x"] * 17}, "17 stop strings", "stop"),
    ({**GOOD, "stop": [1]}, "valid string", "stop[0]"),
    ({**GOOD, "stream": "yes"}, "valid boolean", "stream"),
    ({**GOOD, "temprature": 1}, "unknown member", "temprature"),
    ({**GOOD, "min_tokens": 3, "max_tokens": 2}, "from 0 to max_tokens, 2", "min_tokens"),
    ({**GOOD, "min_tokens": -1}, "from 0", "min_tokens"),
    ({**GOOD, "stop_token_ids": [256]}, "the model's tokens, 0 to 255", "stop_token_ids"),
    ({**GOOD, "stop_token_ids": [1] * 129}, "at most 128", "stop_token_ids"),
    ({**GOOD, "logit_bias": {"-1": 2}}, "no token's id", "logit_bias"),
    ({**GOOD, "logit_bias": {"1": 2, "01": 3}}, "twice", "logit_bias"),
    ({**GOOD, "logit_bias": {"1": 101}}, "from -100 to 100", "logit_bias"),
    ({**GOOD, "logit_bias": {"9" * 400: 1}}, "the model's tokens", "logit_bias"),
    ({**GOOD, "chat_template": "x"}, "unknown member", "chat_template"),
    ({**GOOD, "n": 1000}, "n is 1000; it must be 1 to 128", "n"),
    ({**GOOD, "logprobs": 1}, "valid boolean", "logprobs"),
    ({**GOOD, "logprobs": True, "top_logprobs": 21}, "less than or equal to 20", "top_logprobs"),
    ({**GOOD, "top_logprobs": 2}, "logprobs is not true", "top_logprobs"),
    ({**GOOD, "response_format": {"type": "jsonl"}}, "json_object", "response_format.type"),
    ({**GOOD, "response_format": schema({"type": "foo"})}, "Invalid type: foo", "response_format"),
    ({**GOOD, "response_format": schema(1)}, "valid", "response_format.json_schema.schema"),
    ({**GOOD, "structured_outputs": {}}, "names nothing", "structured_outputs"),
    ({**GOOD, "structured_outputs": {"regex": "("}}, "unclosed", "structured_outputs"),
    (
        {**GOOD, "structured_outputs": {"regex": "a", "choice": ["b"]}},
        "one grammar alone",
        "structured_outputs",
    ),
    (
        {**GOOD, "structured_outputs": {"regex": "a"}, "ignore_eos": True},
        "ends where that does",
        "ignore_eos",
    ),
    ({**GOOD, "chat_template_kwargs": {"tools": 1}}, "gives the template", "chat_template_kwargs"),
]


async def test_bad_input_is_named_and_the_cell_serves_on(http: Edge) -> None:
    await http.cell.deployed()
    for body, said, param in BAD:
        response = await http.post("/v1/chat/completions", body)
        error = error_of(response)
        assert response.status_code == 400, body
        assert said in error["message"], body
        assert error["param"] == param, body
    for prompt in ("", [], [300], [-1], ["x"] * 17, [True], [["a"]], None):
        response = await http.complete(prompt)
        assert response.status_code == 400, prompt
        assert error_of(response)["param"].partition("[")[0] == "prompt", prompt
    assert (await http.chat(max_tokens=1)).status_code == 200
    assert (await http.cell.status()).queued == 0


HERE: Sequence[tuple[dict[str, str], int]] = (
    ({"Host": "evil.example:8070"}, 403),
    ({"Host": "localhost.evil.example"}, 403),
    ({"Host": "127.evil.example"}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://203.0.113.5"}, 403),
    ({"Host": "evil.example//localhost"}, 403),
    ({"Host": "[::1]:8070", "Origin": "http://localhost:3000"}, 200),
    ({"Host": "app.localhost"}, 200),
)
ALLOWED: Sequence[tuple[dict[str, str], int]] = (
    ({"Host": "mesh.example"}, 200),
    ({"Host": "MESH.example:443", "Origin": "https://mesh.example"}, 200),
    ({"Host": "localhost"}, 200),
    ({"Host": "evil.mesh.example"}, 403),
    ({"Host": "mesh.example", "Origin": "https://evil.example"}, 403),
    ({"Host": ""}, 403),
)


@pytest.mark.parametrize(("allowed", "told"), [((), HERE), (("mesh.example",), ALLOWED)])
async def test_a_page_of_elsewhere_does_not_reach_a_cell_without_keys(
    tmp_path: Path, allowed: tuple[str, ...], told: Sequence[tuple[dict[str, str], int]]
) -> None:
    """A name that the operator allows is as the loopback's."""
    async with edge(tmp_path, http_hosts_allowed=allowed) as http:
        await http.cell.deployed()
        asked = {**GOOD, "max_tokens": 1}
        for headers, status in told:
            response = await http.post("/v1/chat/completions", asked, headers=headers)
            assert response.status_code == status, headers
            if status == 403:
                assert "no name of this machine's loopback" in error_of(response)["message"]


def make_key(home: Path) -> None:
    """Without any a controller that wants keys does not start."""
    book = KeyBook(home / "controller")
    book.create(Role.ADMIN, TenantName(""))
    book.close()


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    "Access-Control-Request-Private-Network": "true",
}


@pytest.mark.parametrize("keys", [False, True])
async def test_pages_of_allowed_origins_may_ask(tmp_path: Path, keys: bool) -> None:
    """A preflight needs no key, and errors can be read."""
    make_key(tmp_path)
    page, other = "https://chat.example", "https://evil.example"
    async with edge(tmp_path, http_origins=(page,), keys=keys) as http:
        url = http.url + "/v1/chat/completions"
        for origin, status in ((page, 200), (other, 400)):
            told = await asyncio.to_thread(
                requests.options, url, headers={**PREFLIGHT, "Origin": origin}, timeout=WAIT_S_MAX
            )
            assert told.status_code == status
            allowed = told.headers.get("access-control-allow-origin")
            assert allowed == (page if status == 200 else None)
            if status == 200:
                names = told.headers["access-control-allow-headers"]
                assert names == PREFLIGHT["Access-Control-Request-Headers"]
                methods = told.headers["access-control-allow-methods"].split(", ")
                assert {"GET", "POST", "DELETE"} <= {*methods}, "all that a route takes"
        asked = await http.post("/v1/chat/completions", GOOD, headers={"Origin": page})
        assert error_of(asked)["code"] == ("invalid_api_key" if keys else "model_not_found")
        assert asked.headers["access-control-allow-origin"] == page
        exposed = asked.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "retry-after"} <= {*exposed}
        asked = await http.post("/v1/chat/completions", GOOD, headers={"Origin": other})
        assert asked.status_code == (401 if keys else 403)
        assert "access-control-allow-origin" not in asked.headers


async def test_all_pages_may_ask_and_names_that_lead_elsewhere_stay_refused(
    tmp_path: Path,
) -> None:
    async with edge(tmp_path, http_origins=("*",)) as http:
        await http.cell.deployed()
        body = {**GOOD, "max_tokens": 1, "stream": True}
        headers = {"Origin": "https://any.example"}
        answer = await http.post("/v1/chat/completions", body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        headers["Host"] = "evil.example"
        answer = await http.post("/v1/chat/completions", body, headers=headers)
        assert answer.status_code == 403


async def test_without_origins_no_page_is_told_that_it_may_ask(http: Edge) -> None:
    answer = await asyncio.to_thread(
        requests.options,
        http.url + "/v1/models",
        headers={**PREFLIGHT, "Origin": "http://localhost:3000"},
        timeout=WAIT_S_MAX,
    )
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("keys", [False, True])
async def test_the_root_says_what_this_is_and_names_docs(tmp_path: Path, keys: bool) -> None:
    make_key(tmp_path)
    async with edge(tmp_path, keys=keys) as http:
        for path in ("/", "/v1"):
            answer = await http.get(path)
            assert answer.status_code == 200
            assert answer.json()["name"] == "mesh"
            document = await http.get(answer.json()["documentation"])
            assert {"/", "/v1"} <= document.json()["paths"].keys()


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://chat.example", "https://chat.example"),
        ("HTTPS://Chat.Example:443/", "https://chat.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("https://chat.example:80", "https://chat.example:80"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("*", "*"),
        ("chat.example", None),
        ("https://chat.example/path", None),
        ("https://*.example", None),
        ("null", None),
        ("", None),
    ],
)
def test_origins_are_read_as_browsers_say_them(given: str, origin: str | None) -> None:
    if origin is None:
        with pytest.raises(InvalidInput, match="--http-cors"):
            read_origin(given)
    else:
        assert read_origin(given) == origin


async def test_bodies_are_json_of_bounded_length(http: Edge) -> None:
    await http.cell.deployed()
    large = b'{"model": "' + b"x" * (UNREAD_BYTES_MAX - 100) + b'"}'
    response = await http.post("/v1/chat/completions", large)
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert str(BODY_BYTES_MAX) in error_of(response)["message"]
    form = await http.post("/v1/chat/completions", b"{}", headers={"Content-Type": "text/plain"})
    assert (form.status_code, error_of(form)["code"]) == (415, "unsupported_media_type")
    for encoding, status in (("gzip", 415), ("br, gzip", 415), ("Identity", 400)):
        headers = {"Content-Encoding": encoding}
        response = await http.post("/v1/chat/completions", gzip.compress(b"{}"), headers=headers)
        assert response.status_code == status


def test_bodies_together_are_bounded() -> None:
    bodies = Bodies(bytes_max=100, count_max=2)
    with bodies.reading() as one:
        one.add(b"x" * 60)
        with bodies.reading() as other:
            with pytest.raises(
                Refused, match="60 bytes of bodies are being read; 100 is the limit"
            ):
                other.add(b"x" * 41)
            with pytest.raises(Refused, match="2 bodies are being read; 2"), bodies.reading():
                pass
        one.drop()
        one.add(b"x" * 100)
    with bodies.reading() as one:
        one.add(b"x" * 100)
        assert one.whole() == b"x" * 100


def test_bodies_of_one_tenant_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, asks = Bodies(bytes_max=100, count_max=8), TenantName("a")
    monkeypatch.setattr(exchange, "caller", lambda: Caller(role=Role.TENANT, tenant=asks))
    with bodies.reading() as one, bodies.reading() as two:
        one.add(b"x" * 20)
        with pytest.raises(Refused, match="20 bytes of bodies are being read; 25 is the limit"):
            two.add(b"x" * 6)
        with pytest.raises(Refused, match="2 bodies are being read; 2"), bodies.reading():
            pass
        asks = TenantName("b")
        with bodies.reading() as other:
            other.add(b"x" * 25)


async def test_bodies_are_given_back_whatever_becomes_of_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes more than a half of what may be in hand; ten come one after the other."""
    monkeypatch.setattr("mesh.http.app.Bodies", partial(Bodies, bytes_max=190_000))
    async with edge(tmp_path) as http:
        await http.cell.deployed()
        for _ in range(10):
            response = await http.complete("x" * 100_000)
            assert error_of(response)["code"] == "context_length_exceeded"
        assert (await http.chat(max_tokens=1)).status_code == 200


async def test_a_body_that_declares_far_too_much_is_refused_unread(http: Edge) -> None:
    ask = partial(raw, http, b"POST /v1/completions", b"", missing_bytes=UNREAD_BYTES_MAX + 1)
    with await asyncio.to_thread(ask) as client:
        answer = await asyncio.to_thread(read_all, client)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert b"%d bytes" % (UNREAD_BYTES_MAX + 1) in answer


async def test_chunks_without_an_end_are_refused_at_a_bound(http: Edge) -> None:
    host, port = http.url.removeprefix("http://").split(":")

    def send() -> tuple[int, bytes]:
        chunk, sent_bytes = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n", 0
        with socket.create_connection((host, int(port)), timeout=WAIT_S_MAX) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            # What comes after the answer may break off; the answer is there nevertheless.
            with suppress(ConnectionError):
                while not select.select([client], [], [], 0)[0]:
                    client.sendall(chunk)
                    sent_bytes += len(chunk)
            return sent_bytes, client.recv(1 << 16)

    sent_bytes, answer = await asyncio.to_thread(send)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert sent_bytes < 2 * UNREAD_BYTES_MAX


async def test_endless_bodies_end_connections(http: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    await http.cell.deployed()
    monkeypatch.setattr("mesh.http.exchange.BODY_S_MAX", 0.2)
    # What is sent of a body that is too long must have come by then, on a busy machine, too.
    monkeypatch.setattr("mesh.http.exchange.BODY_BYTES_MAX", 1000)
    for sent in (b"", b"x" * 1001):
        ask = partial(raw, http, b"POST /v1/completions", sent, missing_bytes=1 << 20)
        with await asyncio.to_thread(ask) as client:
            answer = await asyncio.to_thread(read_all, client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer


async def test_endless_headers_and_no_http_are_cut_short(http: Edge) -> None:
    def said(*parts: bytes) -> bytes:
        host, port = http.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S_MAX) as client:
            with suppress(ConnectionError):
                for part in parts:
                    client.sendall(part)
                return read_all(client)
            return b""

    endless = (b"GET / HTTP/1.1\r\n", *[b"X: " + b"x" * 997 + b"\r\n"] * (HEAD_BYTES_MAX // 900))
    answer = await asyncio.to_thread(said, *endless)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""
    one = (b"GET / HTTP/1.1\r\nX: ", *[b"x" * 1000] * (HEAD_BYTES_MAX // 900))
    answer = await asyncio.to_thread(said, *one)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""
    answer = await asyncio.to_thread(said, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert (await http.get("/healthz")).status_code == 200


async def test_an_endless_chat_template_ends_its_own_calls_and_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healthy when it is tried. Two of its calls are killed, the others are refused at once."""
    monkeypatch.setattr("mesh.text.pool.WAIT_S_MAX", WAIT_S_MAX)
    monkeypatch.setattr("mesh.text.pool.CALL_CPU_S", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    async with edge(tmp_path) as http:
        node = await http.cell.node()
        node.text = replace(
            node.text, chat_template="{% if messages[0].content == 'x' %}" + loop + "{% endif %}ok"
        )
        assert (await asyncio.to_thread(http.cell.client.deploy, SPEC)).message == "deployed"
        assert (await http.chat(max_tokens=1)).status_code == 200
        bad = {"model": "chat", "messages": [{"role": "user", "content": "x"}]}
        ask = partial(
            requests.post, http.url + "/v1/chat/completions", json=bad, timeout=WAIT_S_MAX
        )
        threads = ThreadPoolExecutor(8)  # the loop's own are those of the controller
        calls = [asyncio.get_running_loop().run_in_executor(threads, ask) for _ in range(8)]
        ended: list[int] = []
        while not ended or ended[-1] < len(calls):
            for path in ("/healthz", "/metrics"):
                assert (await http.get(path)).status_code == 200
            ended.append(sum(call.done() for call in calls))
        beside = sum(before == after for before, after in pairwise(ended))
        assert beside > 5, "neither the loop nor the threads of /metrics waited for a call"
        errors = sorted([(await call).json()["error"]["code"] for call in calls])
        assert errors == ["invalid_request"] * 2 + ["text_on_hold"] * 6
        refused = next(call.result() for call in calls if call.result().status_code == 429)
        assert 0 < float(refused.headers["Retry-After"]) <= 60
        threads.shutdown()


@pytest.mark.parametrize("value", ["\ud800", {"a\ud800": 1}, {"a": ["b\udfff"]}])
def test_half_a_character_is_told_as_a_question_mark(value: Any) -> None:
    assert b"?" in encoded(value)
