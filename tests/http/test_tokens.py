"""Tokens over HTTP: `/tokenize` and `/detokenize`, what they say of texts and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest

from mesh.controller import tokenizers
from mesh.http.tokens import Detokenized, Tokenized
from tests.controller.live import ASSETS, MODEL, SPEC
from tests.http.edge import HELLO, Edge
from tests.http.test_answers import held_to
from tests.http.test_refusals import error_of
from tests.http.test_tools import TOOL, calling

TEXT = "Grüße, 世界!"


async def asked(http: Edge, path: str, **body: Any) -> dict[str, Any]:
    response = await http.post(path, {"model": "chat", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    held_to(Tokenized if path == "/tokenize" else Detokenized, answer)
    return answer


@pytest.mark.parametrize("inline", [True, False])
async def test_a_text_becomes_tokens_and_text_again(
    http: Edge, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    if not inline:
        monkeypatch.setattr(tokenizers, "INLINE_CHARS_MAX", 0)
        monkeypatch.setattr(tokenizers, "INLINE_TOKENS_MAX", 0)
    await http.cell.deployed()
    told = await asked(http, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) == len(TEXT.encode())
    assert told["max_model_len"] == MODEL.context_tokens_max
    assert told["token_strs"][:3] == ["G", "r", "bytes:\\xc3"]
    assert (await asked(http, "/detokenize", tokens=told["tokens"])) == {"prompt": TEXT}
    plain = await asked(http, "/tokenize", prompt=TEXT, add_special_tokens=False)
    assert (plain["tokens"], plain["token_strs"]) == (told["tokens"], None)


async def test_a_text_begins_as_the_model_wants_unless_it_is_a_part(http: Edge) -> None:
    node = await http.cell.node()
    node.text = replace(ASSETS, bos_token="!", add_bos=True)
    await http.cell.ask(http.cell.client.deploy, SPEC)
    bos, *rest = (await asked(http, "/tokenize", prompt="hi"))["tokens"]
    assert (await asked(http, "/tokenize", prompt="!"))["tokens"] == [bos]
    told = await asked(http, "/tokenize", prompt="hi", add_special_tokens=False)
    assert told["tokens"] == rest


async def test_a_conversation_is_rendered_with_its_tools(http: Edge) -> None:
    await calling(http, "yes")
    told = await asked(http, "/tokenize", messages=HELLO, tools=[TOOL])
    said = await asked(http, "/detokenize", tokens=told["tokens"])
    assert said["prompt"] == "<tool_call> weather<user>hi<assistant>"


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/tokenize", {}, "invalid_request"),
    ("/tokenize", {"prompt": "hi", "messages": HELLO}, "invalid_request"),
    ("/tokenize", {"prompt": 3}, "invalid_request"),
    ("/tokenize", {"prompt": "hi", "tools": [TOOL]}, "invalid_request"),
    ("/tokenize", {"messages": HELLO, "tools": [TOOL]}, "invalid_request"),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "invalid_request"),
    ("/tokenize", {"messages": HELLO, "continue_final_message": True}, "invalid_request"),
    ("/tokenize", {"prompt": "x" * (1 << 20)}, "context_length_exceeded"),
    ("/tokenize", {"model": "chta", "prompt": "hi"}, "model_not_found"),
    ("/detokenize", {"tokens": [1 << 40]}, "invalid_request"),
    ("/detokenize", {"tokens": ["a"]}, "invalid_request"),
    ("/detokenize", {"tokens": [1] * 600}, "context_length_exceeded"),
    ("/detokenize", {"model": "chta", "tokens": [1]}, "model_not_found"),
)


async def test_what_is_wrong_is_refused(http: Edge) -> None:
    await http.cell.deployed()
    for path, body, code in WRONG:
        response = await http.post(path, {"model": "chat", **body})
        assert response.status_code == (404 if code == "model_not_found" else 400), body
        assert error_of(response)["code"] == code, body


async def test_version_and_ping_need_no_node_and_names_may_hold_a_slash(http: Edge) -> None:
    assert list((await http.get("/version")).json()) == ["version"]
    for alive in (await http.get("/ping"), await http.post("/ping", {})):
        assert (alive.status_code, alive.content) == (200, b"")
    for name in ("meta-llama/Llama-3", "meta-llama%2FLlama-3"):
        response = await http.get(f"/v1/models/{name}")
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
