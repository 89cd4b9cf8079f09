"""What clients of OpenAI's protocol are answered, over a real loopback server."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from tokenizers import Tokenizer

from mesh.domain.invocation import Invocation, TextPrompt, Tokens
from mesh.domain.messages import SubmitRequest
from mesh.domain.request import Request, SamplingParams, TokenBias, TokenLogprobs
from mesh.domain.text import SamplingDefaults
from mesh.http.answers import ChatChunk, ChatCompletion, Completion
from mesh.http.asking import with_defaults
from mesh.http.logprobs import Characters, completion_logprobs
from mesh.http.models import ModelCard, ModelList
from tests.controller.live import ASSETS, MODEL, SPEC, TOP, FakeNode
from tests.http.edge import Edge, edge, events


def asked(node: FakeNode) -> list[SamplingParams]:
    return [c.order.request.sampling for c in node.commands if isinstance(c, SubmitRequest)]


def ids_of(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_str(ASSETS.tokenizer_json.decode()).encode(text).ids
    return ids


def requests_of(node: FakeNode) -> list[Request]:
    return [c.order.request for c in node.commands if isinstance(c, SubmitRequest)]


def held_to(schema: type[BaseModel], value: object) -> None:
    """`value` has every member of the schema that it must have, and no other."""
    assert schema.model_validate(value, strict=True, extra="forbid")


async def test_a_chat_is_answered_whole(http: Edge) -> None:
    node = await http.cell.deployed()
    response = await http.chat(max_tokens=4)
    assert response.status_code == 200
    request_id = requests_of(node)[-1].request_id
    assert response.headers["x-request-id"] == request_id
    answer = response.json()
    held_to(ChatCompletion, answer)
    assert (answer["id"], answer["model"]) == (f"chatcmpl-{request_id}", "chat")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "aaaa", "refusal": None}
    assert choice["finish_reason"] == "length"
    prompt = len("<user>hi<assistant>")
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_streams_role_text_end_usage_and_done(http: Edge) -> None:
    node = await http.cell.deployed()
    response = await http.chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    submitted = await node.told(SubmitRequest)
    assert response.headers["x-request-id"] == submitted.order.request.request_id
    *chunks, done = events(response)
    assert done == "[DONE]"
    for chunk in chunks:
        held_to(ChatChunk, chunk)
    first, *pieces, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "aaa"
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_each_chunk_says_how_many_tokens_there_are_so_far(http: Edge, kind: str) -> None:
    """Each chunk counts the tokens of its own answer; the last chunk counts those of all."""
    await http.cell.deployed()
    asked = {
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if kind == "chat":
        *chunks, last, done = events(await http.chat(**asked))
        prompts, opening = [len("<user>hi<assistant>")], [0]
    else:
        *chunks, last, done = events(await http.complete(["x", "yz"], **asked))
        prompts, opening = [1, 2], []
    assert (done, last["choices"]) == ("[DONE]", [])
    for chunk in chunks:
        held_to(ChatChunk if kind == "chat" else Completion, chunk)
    for number, prompt in enumerate(prompts):
        told = [one["usage"] for one in chunks if one["choices"][0]["index"] == number]
        assert [one["completion_tokens"] for one in told] == [*opening, 1, 2, 3, 3]
        assert {one["prompt_tokens"] for one in told} == {prompt}
        assert all(one["total_tokens"] == prompt + one["completion_tokens"] for one in told)
    assert last["usage"]["completion_tokens"] == 3 * len(prompts)


async def test_without_include_usage_chunks_say_nothing_of_it(http: Edge) -> None:
    await http.cell.deployed()
    alone = {"continuous_usage_stats": True}
    *chunks, done = events(await http.chat(max_tokens=2, stream=True, stream_options=alone))
    assert done == "[DONE]"
    assert not any("usage" in chunk for chunk in chunks)


async def test_completions_take_text_tokens_or_several_of_either(http: Edge) -> None:
    node = await http.cell.deployed()
    given: list[tuple[object, list[int]]] = [("née", [4]), ([1, 2, 3], [3])]
    given += [(["a", "bc"], [1, 2]), ([[1], [2, 3]], [1, 2])]
    for prompt, tokens in given:
        answer = (await http.complete(prompt, max_tokens=2)).json()
        held_to(Completion, answer)
        assert [choice["text"] for choice in answer["choices"]] == ["aa"] * len(tokens)
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(tokens)))
        assert answer["usage"]["prompt_tokens"] == sum(tokens)
        asked = requests_of(node)[-len(tokens) :]
        assert sorted(len(request.prompt_tokens) for request in asked) == tokens


async def test_several_completions_stream_together_and_end_once(http: Edge) -> None:
    await http.cell.deployed()
    *chunks, done = events(await http.complete(["x"] * 5, max_tokens=3, stream=True))
    assert done == "[DONE]"
    texts = [""] * 5
    for chunk in chunks:
        held_to(Completion, chunk)
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["aaa"] * 5
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 5


PART = {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -0.5, "bytes": [0xA4]}
NEVER = {"token": "a", "logprob": -9999.0, "bytes": [0x61]}


@pytest.mark.parametrize("top", [0, 1, 2])
async def test_a_chat_tells_log_probabilities_whole_and_streamed(http: Edge, top: int) -> None:
    """A part of a character by its byte, and an infinity as JSON can say it."""
    await http.cell.deployed()
    told = [{**PART, "top_logprobs": [PART, NEVER][:top]}] * 3
    answer = (await http.chat(max_tokens=3, logprobs=True, top_logprobs=top)).json()
    held_to(ChatCompletion, answer)
    assert answer["choices"][0]["logprobs"] == {"content": told, "refusal": None}
    asked = http.chat(max_tokens=3, stream=True, logprobs=True, top_logprobs=top)
    *chunks, _ = events(await asked)
    for chunk in chunks:
        held_to(ChatChunk, chunk)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [one for part in streamed if part for one in part["content"]] == told


async def test_completions_tell_log_probabilities_with_their_places(http: Edge) -> None:
    await http.cell.deployed()
    asked = {"prompt": ["x", "yz"], "max_tokens": 3}
    choices = (await http.complete(**asked, logprobs=2)).json()["choices"]
    text = r"bytes:\xa4"
    for choice in choices:
        assert choice["logprobs"] == {
            "tokens": [text] * 3,
            "token_logprobs": [-0.5] * 3,
            "top_logprobs": [{text: -0.5, "a": -9999.0}] * 3,
            "text_offset": [0, 1, 2],
        }
    places: list[list[int]] = [[], []]
    *chunks, _ = events(await http.complete(**asked, logprobs=0, stream=True))
    for chunk in chunks:
        held_to(Completion, chunk)
        (choice,) = chunk["choices"]
        if told := choice["logprobs"]:
            assert told["top_logprobs"] is None
            places[choice["index"]] += told["text_offset"]
    assert places == [[0, 1, 2]] * 2
    refused = await http.complete("x", logprobs=21)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


def test_parts_of_a_character_are_told_apart_and_have_its_place() -> None:
    tokens = {0: b"a", 1: "\N{EURO SIGN}".encode()[:1], 2: "\N{EURO SIGN}".encode()[1:], 3: b"b"}
    drawn = (TokenLogprobs(logprob=-0.5, top=((1, -1.0), (2, -2.0), (3, -3.0))),) * 4
    given = Tokens(first_index=0, token_ids=(0, 1, 2, 3), text="a\N{EURO SIGN}b", logprobs=drawn)
    told = completion_logprobs(given, tokens.__getitem__, Characters())
    assert told.tokens == ["a", r"bytes:\xe2", r"bytes:\x82\xac", "b"]
    assert told.text_offset == [0, 1, 1, 2]
    assert told.top_logprobs is not None
    assert told.top_logprobs[0] == {
        "a": -0.5,
        r"bytes:\xe2": -1.0,
        r"bytes:\x82\xac": -2.0,
        "b": -3.0,
    }


async def test_what_asks_for_nothing_is_taken(http: Edge) -> None:
    """As greedy, as another seed, or as if it were not there."""
    node = await http.cell.deployed()
    neutral: dict[str, Any] = {
        "min_tokens": 0,
        "chat_template": None,
        "skip_special_tokens": True,
        "include_reasoning": True,
        "return_token_ids": False,
        "return_tokens_as_token_ids": False,
        "request_id": "mine",
        "stop_token_ids": [],
        "nobody_knows_it": None,
    }
    for body in ({"top_p": 0}, {"top_p": 0.0, "temperature": 0.7}, {"seed": -1}, neutral):
        assert (await http.chat(max_tokens=1, **body)).status_code == 200, body
        assert (await http.complete("x", max_tokens=1, **body)).status_code == 200, body
    seeds = (-(1 << 63), -2, (1 << 63) - 1)
    for seed in seeds:
        assert (await http.chat(max_tokens=1, seed=seed)).status_code == 200
    sampling = asked(node)
    assert [(one.temperature, one.top_p) for one in sampling[:4]] == [(0.0, 1.0)] * 4
    assert [one.seed for one in sampling[4:6]] == [(1 << 63) - 1] * 2
    assert [one.seed for one in sampling[8:]] == [0, (1 << 63) - 2, (1 << 63) - 1]


async def test_what_is_asked_reaches_the_node(http: Edge) -> None:
    node = await http.cell.deployed()
    await http.chat(
        max_completion_tokens=2,
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        stop=["x", "y"],
        repetition_penalty=1.5,
        ignore_eos=True,
        min_tokens=1,
        stop_token_ids=[5, 6],
        logit_bias={"7": -100, "8": 0.5},
        user="u",
        store=True,
        metadata={"a": "b"},
        n=1,
        logprobs=False,
        min_p=0.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        response_format={"type": "text"},
        tools=[],
    )
    assert asked(node) == [
        SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=3,
            min_p=0.1,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            max_tokens=2,
            ignore_eos=True,
            min_tokens=1,
            stop=("x", "y"),
            stop_token_ids=(5, 6),
            logit_bias=(TokenBias(token_id=7, bias=-100.0), TokenBias(token_id=8, bias=0.5)),
        )
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_for_a_load_is_told_how_late_it_will_be(
    tmp_path: Path, stream: bool
) -> None:
    """By a cell that has seen no loads."""
    late = {"x-slo-ttft-ms": "20"}
    body = {"model": "chat", "prompt": "x", "max_tokens": 2, "stream": stream}
    async with edge(tmp_path) as http:
        await http.cell.deployed()
        told = await http.post("/v1/completions", body, headers=late)
        assert told.status_code == 200, told.text
        assert 0 < int(told.headers["x-slo-grace-ms"]) < 60_000
        again = await http.post("/v1/completions", body)
        assert "x-slo-grace-ms" not in again.headers


def test_absent_numbers_are_as_the_models_makers_recommend() -> None:
    recommended = SamplingDefaults(
        temperature=0.3, top_p=0.8, top_k=40, repetition_penalty=1.1, min_p=0.05
    )
    asked = Invocation(deployment=SPEC.name, prompt=TextPrompt(text="x"), temperature=0.9)
    filled = with_defaults(asked, recommended)
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.9, 0.8, 40)
    assert (filled.min_p, filled.repetition_penalty) == (0.05, 1.1)
    assert with_defaults(replace(asked, min_p=0.0), recommended).min_p == 0.0


async def test_absent_numbers_are_openais_and_what_the_context_leaves(http: Edge) -> None:
    node = await http.cell.deployed()
    await http.complete([1] * 12, stop="x")
    await http.complete([1] * 12, top_k=-1, max_tokens=10_000)
    for sampling in asked(node):
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        assert sampling.max_tokens == MODEL.context_tokens_max - 12


async def test_contents_in_parts_and_developers_are_understood(http: Edge) -> None:
    node = await http.cell.deployed()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "audio": None},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
    assert (await http.chat(messages=messages, max_tokens=1)).status_code == 200
    (order,) = (c.order.request for c in node.commands if isinstance(c, SubmitRequest))
    assert len(order.prompt_tokens) == len("<system>x<user>abc<assistant><tool>y<assistant>")


async def test_models_are_listed_with_their_context_state_and_slo(http: Edge) -> None:
    await http.cell.deployed()
    listed = (await http.get("/v1/models")).json()
    held_to(ModelList, listed)
    card = (await http.get("/v1/models/chat")).json()
    held_to(ModelCard, card)
    assert listed["data"] == [card]
    assert (card["id"], card["max_model_len"], card["state"]) == ("chat", 512, "ready")
    assert card["slo"]["ttft_s"] == SPEC.slo.ttft_s


async def test_metrics_count_what_was_answered(http: Edge) -> None:
    await http.cell.deployed()
    body = {"model": "chat", "prompt": "one two", "max_tokens": 3}
    assert (await http.post("/v1/completions", body)).status_code == 200
    scraped = await http.get("/metrics")
    assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
    (ended,) = [
        sample
        for family in text_string_to_metric_families(scraped.text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    ]
    assert (ended.labels["model_name"], ended.value) == ("chat", 1.0)


async def test_health_readiness_and_schema(http: Edge) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    unready = await http.get("/readyz")
    assert (unready.status_code, unready.json()["error"]["code"]) == (503, "unavailable")
    await http.cell.deployed()
    assert (await http.get("/readyz")).status_code == 200
    schema = (await http.get("/openapi.json")).json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            given = path.replace("{model}", "chat")
            if method == "delete":
                ask = http.delete(given)
            else:
                ask = http.get(given) if method == "get" else http.post(given, {})
            assert str((await ask).status_code) in operation["responses"], path


async def test_gateways_of_both_protocols_share_ids_and_limits(tmp_path: Path) -> None:
    async with edge(tmp_path) as http:
        await http.cell.deployed()
        answers = await asyncio.gather(*(http.chat(max_tokens=2) for _ in range(8)))
        assert {answer.headers["x-request-id"] for answer in answers} == {
            f"r1-{n}" for n in range(1, 9)
        }
        assert (await http.cell.status()).served == 8


async def test_how_an_answer_has_to_look_reaches_its_node(http: Edge) -> None:
    node = await http.cell.deployed()
    for how in (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"json": {"type": "integer"}}},
        {"logprobs": True, "top_logprobs": 3},
    ):
        assert (await http.chat(max_tokens=1, **how)).status_code == 200
    grammars = [sampling.grammar for sampling in asked(node)]
    assert [grammar.text for grammar in grammars if grammar is not None] == [
        '{"type":"object"}',
        "{}",
        'start: "yes" | "no"',
        '{"type": "integer"}',
    ]
    assert [sampling.logprobs for sampling in asked(node)] == [None] * 4 + [3]


async def test_a_prompt_comes_back_with_its_log_probabilities_alone(http: Edge) -> None:
    """As harnesses ask for the likelihood of a continuation: whole, streamed, by tokens."""
    node = await http.cell.deployed()
    ids = ids_of("hi!")
    for prompt, body in (
        ("hi!", {"max_tokens": 0}),
        (ids, {"max_tokens": 0}),
        (ids, {"max_tokens": 1}),
        ([ids, ids], {"max_tokens": 0}),
    ):
        response = await http.complete(prompt, echo=True, logprobs=2, **body)
        assert response.status_code == 200, response.text
        answer = response.json()
        held_to(Completion, answer)
        new = body["max_tokens"]
        for choice in answer["choices"]:
            assert choice["text"] == "hi!" + "a" * new
            assert choice["finish_reason"] == "length"
            told = choice["logprobs"]
            assert told["tokens"][:3] == ["h", "i", "!"]
            assert told["token_logprobs"] == [None, -0.25, -0.25, -0.5][: 3 + new]
            assert told["top_logprobs"][0] is None
            assert len(told["top_logprobs"][1]) == 3
            assert told["text_offset"] == [0, 1, 2, 3][: 3 + new]
        assert answer["usage"]["completion_tokens"] == new * len(answer["choices"])
    twice = await http.complete(ids, echo=True, logprobs=0, max_tokens=1, n=2)
    assert twice.json()["usage"]["prompt_tokens"] == 6, "each answer computes the prompt"
    assert {one.cache_salt for one in requests_of(node)} == {None}
    assert {one.sampling.prompt_logprobs for one in requests_of(node)} == {0, 2}
    streamed = await http.complete("hi!", echo=True, logprobs=0, max_tokens=2, stream=True)
    *chunks, _ = events(streamed)
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "hi!aa"
    assert len(chunks[0]["choices"][0]["logprobs"]["tokens"]) == 4


async def test_prompt_logprobs_are_told_as_vllm_does(http: Edge) -> None:
    await http.cell.deployed()
    response = await http.complete("hi", prompt_logprobs=1, max_tokens=1)
    answer = response.json()
    held_to(Completion, answer)
    (choice,) = answer["choices"]
    first, second = choice["prompt_logprobs"]
    (own,) = ids_of("i")
    assert (first, choice["text"], choice["logprobs"]) == (None, "a", None)
    assert second[str(own)] == {"logprob": -0.25, "rank": None, "decoded_token": "i"}
    assert second[str(TOP[0][0])]["rank"] == 1
    chat = (await http.chat(prompt_logprobs=0, max_tokens=1)).json()
    held_to(ChatCompletion, chat)
    assert len(chat["prompt_logprobs"]) == len("<user>hi<assistant>")
    for wrong in ({"stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        refused = await http.complete("hi", **{"prompt_logprobs": 1, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    alone = await http.complete("hi", max_tokens=0)
    assert alone.json()["error"]["param"] == "max_tokens"
