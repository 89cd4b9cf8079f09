"""Ollama's API over HTTP: what is asked, lines and whole answers, what is listed, its errors."""

import json
from typing import Any

import pytest
import requests

from mesh.domain.grammar import GrammarKind
from tests.http.edge import HELLO, Edge
from tests.http.test_thoughts import QWEN, thinking
from tests.http.test_tools import CALL, TOOL, calling, orders


def lines(response: requests.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("path", ["chat", "generate"])
async def test_an_answer_is_told_by_lines_or_whole(http: Edge, path: str) -> None:
    await http.cell.deployed()
    said = {"messages": HELLO} if path == "chat" else {"prompt": "hi", "images": [], "context": []}
    nothing = {"mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "typical_p": 1, "main_gpu": 0}
    options = {"num_predict": 3, "num_ctx": 9, **nothing}
    asked = {"model": "chat:latest", "options": options, "truncate": True, "shift": True, **said}

    def text_of(told: dict[str, Any]) -> str:
        text: str = told["message"]["content"] if path == "chat" else told["response"]
        return text

    *pieces, last = lines(await http.post(f"/api/{path}", asked))
    assert "".join(map(text_of, pieces)) == "aaa"
    assert [one["done"] for one in pieces] == [False] * 3
    whole = (await http.post(f"/api/{path}", {**asked, "stream": False})).json()
    assert (text_of(whole), text_of(last)) == ("aaa", "")
    for end in (whole, last):
        assert (end["done"], end["done_reason"], end["eval_count"]) == (True, "length", 3)
        assert end["prompt_eval_count"] == len("<user>hi<assistant>")
        assert end["total_duration"] >= end["prompt_eval_duration"] > 0


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("generate", {}, {"response": ""}),
        ("generate", {"prompt": "", "stream": False}, {"response": ""}),
    ],
)
async def test_a_call_without_a_prompt_loads_the_model(
    http: Edge, path: str, body: dict[str, Any], said: dict[str, Any]
) -> None:
    node = await http.cell.deployed()
    for reason, keep in (("unload", {"keep_alive": 0}), ("load", {"keep_alive": "5m"})):
        answer = (await http.post(f"/api/{path}", {"model": "chat", **body, **keep})).json()
        assert answer.pop("created_at")
        assert answer == {"model": "chat", **said, "done": True, "done_reason": reason}
        assert len(orders(node)) == (reason == "load")
    missing = await http.post(f"/api/{path}", {"model": "chta", **body, "keep_alive": 0})
    assert missing.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_and_calls_go_there_and_back(http: Edge, stream: bool) -> None:
    node = await thinking(http, f"<think>Well.</think>I look.\n{CALL}")
    asked = {"model": "chat", "messages": HELLO, "tools": [TOOL], "stream": stream}
    response = await http.post("/api/chat", asked)
    told = lines(response) if stream else [response.json()]
    message: dict[str, Any] = {"role": "assistant", "content": "", "thinking": ""}
    for one in told:
        for name in ("content", "thinking"):
            message[name] += one["message"].get(name, "")
        message |= {"tool_calls": one["message"].get("tool_calls", message.get("tool_calls"))}
    assert (message["content"], message["thinking"]) == ("I look.", "Well.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    node.says = "It rains."
    result = {"role": "tool", "content": "rain", "tool_name": "weather"}
    again = {**asked, "messages": [*HELLO, message, result], "stream": False}
    answer = (await http.post("/api/chat", again)).json()
    assert answer["message"]["content"] == "It rains."


async def test_options_formats_and_think_are_understood(http: Edge) -> None:
    node = await calling(http, "yes")
    options = {"temperature": 0.25, "top_k": 5, "seed": 7, "stop": ["x"], "repeat_penalty": 1.5}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for body in ({"options": options}, {"format": "json"}, {"format": schema}, {"raw": True}):
        asked = {"model": "chat", "prompt": "hi", "system": "Be brief.", "stream": False}
        response = await http.post("/api/generate", {**asked, **body})
        assert response.status_code == 200, response.text
    first, anything, kept, raw = orders(node)
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.25, 5, 7)
    assert (sampling.stop, sampling.repetition_penalty) == (("x",), 1.5)
    assert len(first.prompt_tokens) == len("<system>Be brief.<user>hi<assistant>")
    assert anything.sampling.grammar.kind is kept.sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    assert len(raw.prompt_tokens) == len("hi")


async def test_a_model_is_told_not_to_think(http: Edge) -> None:
    node = await thinking(http, "Yes.", QWEN)
    asked = {"model": "chat", "messages": HELLO, "think": False, "stream": False}
    assert (await http.post("/api/chat", asked)).status_code == 200
    (order,) = orders(node)
    assert len(order.prompt_tokens) == len("<user>hi<assistant><think>\n\n</think>\n\n")


async def test_deployments_are_listed_and_shown(http: Edge) -> None:
    await calling(http, "yes")
    (card,) = (await http.get("/api/tags")).json()["models"]
    assert (card["name"], card["details"]["family"]) == ("chat", "llama")
    await http.post("/api/chat", {"model": "chat", "messages": HELLO, "stream": False})
    (loaded,) = (await http.get("/api/ps")).json()["models"]
    assert (loaded["name"], loaded["context_length"]) == ("chat", 512)
    assert loaded["size_vram"] > 0
    shown = (await http.post("/api/show", {"model": "chat:latest"})).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"] == 512
    assert (await http.get("/api/version")).json().keys() == {"version"}


WRONG: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    ("chat", {"model": "chta", "messages": HELLO}, 404, "did you mean chat?"),
    ("chat", {"messages": [{"role": "user", "images": ["x"]}]}, 400, "images"),
    ("chat", {"messages": HELLO, "options": {"mirostat": 1}}, 400, "mirostat"),
    ("chat", {"messages": HELLO, "options": {"tfs_z": 0.5}}, 400, "tfs_z"),
    ("chat", {"messages": HELLO, "options": {"repeat_penalty": 0}}, 400, "options.repeat_"),
    ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("generate", {"prompt": "a", "images": ["x"]}, 400, "images is not supported"),
    ("generate", {"prompt": "x" * 600, "stream": False}, 400, "512"),
    ("embed", {"input": "x"}, 400, "has task text"),
    ("pull", {}, 400, "mesh deploy"),
)


async def test_what_is_wrong_is_refused_in_its_shape(http: Edge) -> None:
    await http.cell.deployed()
    for path, body, status, named in WRONG:
        response = await http.post(f"/api/{path}", {"model": "chat", **body})
        assert response.status_code == status, response.text
        assert response.json().keys() == {"error"}
        assert named in response.json()["error"], body
