"""Embeddings over HTTP: several texts of a call beside each other, bounds, and errors by name."""

import base64
import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.ids import NodeId
from mesh.domain.model import Task
from mesh.http import embeddings
from tests.controller.live import EMBEDS, PATIENT, SPEC, VECTOR
from tests.http.edge import Edge, edge


async def deployed(http: Edge) -> None:
    await http.cell.node(node_id=NodeId("n2"), run_id="run-2", embeds=True)
    spec = replace(SPEC, name=EMBEDS, task=Task.EMBED)
    await http.cell.ask(http.cell.client.deploy, spec)


async def test_an_answer_in_pieces_is_one_whole_answer(http: Edge) -> None:
    await deployed(http)
    body = {"model": "embeds", "input": ["a"] * 70}
    told = json.loads((await http.post("/v1/embeddings", body)).content)
    assert [one["index"] for one in told["data"]] == list(range(70))
    assert all(one["embedding"] == list(VECTOR) for one in told["data"])
    assert (told["object"], told["model"], told["usage"]["total_tokens"]) == ("list", "embeds", 70)
    packed = (await http.post("/v1/embeddings", {**body, "encoding_format": "base64"})).json()
    held = array("f", base64.b64decode(packed["data"][69]["embedding"]))
    assert list(held) == pytest.approx(VECTOR)
    ollama = (await http.post("/api/embed", body)).json()
    assert ollama["embeddings"] == [list(VECTOR)] * 70
    assert ollama["total_duration"] > 0
    ranked = await http.post("/v1/rerank", {"model": "embeds", "query": "a", "documents": ["b"]})
    assert ranked.json()["results"][0]["relevance_score"] == pytest.approx(1.0)


async def test_a_model_of_vectors_has_no_limit_of_further_tokens(http: Edge) -> None:
    await deployed(http)
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["slo"] == {"ttft_s": 2.0, "ttft_tokens_per_s": 512.0, "tpot_s": None}


async def test_ollamas_call_without_a_prompt_loads_what_embeds(http: Edge) -> None:
    await deployed(http)
    for reason, keep in (("load", {}), ("unload", {"keep_alive": 0})):
        answer = await http.post("/api/generate", {"model": "embeds", **keep})
        assert (answer.status_code, answer.json()["done_reason"]) == (200, reason)


async def test_more_numbers_than_an_answer_may_hold_are_refused(
    http: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployed(http)
    monkeypatch.setattr(embeddings, "NUMBERS_MAX", 4 * 64)
    for texts, status in ((4, 200), (5, 400)):
        body = {"model": "embeds", "input": ["a"] * texts}
        answer = await http.post("/v1/embeddings", body)
        assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == "input"
    assert "256 numbers are the limit" in error["message"]
    assert "at most 4 texts" in error["hint"]


@pytest.mark.parametrize("queue_max", [2, 0])
async def test_texts_that_are_refused_beside_others_are_asked_again(
    tmp_path: Path, queue_max: int
) -> None:
    """All 40 are asked at once, of a queue that holds two, or none at all."""
    async with edge(tmp_path, limits=replace(PATIENT, queue_requests_max=queue_max)) as http:
        await deployed(http)
        body = {"model": "embeds", "input": ["a"] * 40}
        answer = await http.post("/v1/embeddings", body)
        assert answer.status_code == (200 if queue_max else 429), answer.text
        assert len(answer.json().get("data", ())) == (40 if queue_max else 0)


NAMED: tuple[tuple[str, dict[str, object], str], ...] = (
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": [1, 999]}, "input"),
    ("/v1/embeddings", {"input": [[1], [999]]}, "input[1]"),
    ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
)


async def test_an_error_names_the_text(http: Edge) -> None:
    await deployed(http)
    for path, body, name in NAMED:
        answer = await http.post(path, {"model": "embeds", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert error["message"].startswith(f"{name}: ")


async def test_a_text_that_is_too_long_is_named(http: Edge) -> None:
    await deployed(http)
    body = {"model": "embeds", "input": ["a", "a" * 600]}
    error = (await http.post("/v1/embeddings", body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "input[1]: the prompt has 600 tokens" in error["message"]


WRONG: tuple[tuple[str, dict[str, object], str | None], ...] = (
    ("/v1/rerank", {"query": "a", "documents": ["b"] * 10_000}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "input_type": "x"}, "input_type"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/api/embed", {"input": ["a"] * 2049}, None),
    ("/api/embed", {"input": "a" * 600}, None),
    ("/api/embed", {"input": 1}, None),
)


async def test_what_is_wrong_is_refused_in_its_protocols_shape(http: Edge) -> None:
    await deployed(http)
    for path, body, named in WRONG:
        answer = await http.post(path, {"model": "embeds", **body})
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        if named is None:
            assert "input" in error, body
        else:
            assert (error["param"].startswith(named), error["code"]) == (True, "invalid_request")
