"""Asks each operation of the served schema, by schemathesis: what fits it and what does not.

Before: a running cell. After: `Findings`. Undocumented is a status that the schema does not have,
an answer that its schema does not take, and a fault of ours, whether it is the status or comes
later, in a stream. Half of the bodies are a call that would be answered, with a few members drawn:
whole drawn ones hardly ever pass the first check.
"""

import json
from typing import Any

import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from bench.fuzz_protocols import CALL_S_MAX, Findings, drawing

_SHARES = {
    "/v1/chat/completions": 0.2,
    "/v1/completions": 0.2,
    "/v1/messages": 0.1,
    "/v1/messages/count_tokens": 0.05,
    "/v1/responses": 0.15,
    "/api/chat": 0.05,
    "/api/generate": 0.05,
    "/v1/embeddings": 0.05,
    "/v1/rerank": 0.05,
    "/v1/responses/input_tokens": 0.05,
    "/v1/models/{model}": 0.05,
    "/tokenize": 0.05,
    "/detokenize": 0.05,
}
"""The shares of the cases; paths without anything to vary get a few."""
_FEW = 2
_SAID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 9},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi"},
    "/api/show": {},
    "/api/embed": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    **{f"{at}/rerank": {"query": "hi", "documents": ["ho"]} for at in ("", "/v1", "/v2")},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
_MEANT = (
    *("messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs"),
    *("stream", "stream_options", "response_format", "structured_outputs", "chat_template_kwargs"),
    *("ignore_eos", "max_completion_tokens", "user", "metadata", "tokens", "add_special_tokens"),
    *(
        "logit_bias",
        "min_tokens",
        "stop_token_ids",
        "system",
        "thinking",
        "tool_choice",
        "stop_sequences",
        "output_config",
        "input",
        "options",
        "format",
        "think",
        "instructions",
        "max_output_tokens",
        "text",
        "include",
        "store",
        "dimensions",
        "encoding_format",
        "query",
        "documents",
        "top_n",
    ),
)
_OTHERS_MAX = 3
"""What is drawn of a body that would else be answered: at most so many of these."""
_REFUSALS = frozenset(
    {"no_node", "node_lost", "shutting_down", "unavailable", "load_failed", "overloaded_error"}
)
"""The codes of documented refusals from 500 on; a cell whose node is well has no others."""
_FAULTS = frozenset({"internal_error", "engine_failed", "api_error"})


def fuzz_http(url: str, name: str, *, cases: int, seeded: int) -> Findings:
    findings = Findings()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        share = _SHARES.get(operation.path, 0.0)
        # Without a body there is only text in a path, and any text fits.
        modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
        count = max(_FEW, round(cases * share / len(modes)))
        for mode in modes:
            _fuzz(operation, mode, url, name, count, seeded, findings)
    return findings


def _fuzz(
    operation: Any,
    mode: GenerationMode,
    url: str,
    name: str,
    count: int,
    seeded: int,
    findings: Findings,
) -> None:
    @drawing(count, seeded)
    @given(
        case=operation.as_strategy(generation_mode=mode),
        meant=st.none() | st.sets(st.sampled_from(_MEANT), max_size=_OTHERS_MAX),
    )
    def ask(case: Any, meant: set[str] | None) -> None:
        if meant is not None and isinstance(case.body, dict):
            kept = {key: case.body[key] for key in case.body if key in meant}
            case.body = {**_SAID[operation.path], **kept, "model": name}
        _ask(case, url, findings)

    ask()


def _ask(case: Any, url: str, findings: Findings) -> None:
    what = f"{case.method} {case.path} {case.headers!r} {case.body!r}"
    try:
        response = case.call(base_url=url, timeout=CALL_S_MAX)
    except requests.Timeout:
        findings.ended("timeout")
        findings.hung(what)
        return
    except requests.ConnectionError as error:
        findings.ended("disconnected")
        findings.unexpected(f"{error} for {what}")
        return
    findings.ended(str(response.status_code))
    for wrong in _wrong(case, response):
        findings.unexpected(f"{response.status_code} {wrong} for {what}")


def _wrong(case: Any, response: Any) -> list[str]:
    documented = case.operation.definition.raw["responses"]
    if str(response.status_code) not in documented:
        return ["is no status of the schema"]
    wrong = []
    if response.headers.get("content-type", [""])[0].startswith("application/json"):
        try:
            case.validate_response(response, checks=[response_schema_conformance])
        except FailureGroup as failures:
            wrong = [str(failure) for failure in failures.exceptions]
    if response.status_code >= 500 and (code := _code(response.text)) not in _REFUSALS:
        wrong.append(f"{code} is no refusal")
    for line in response.text.splitlines():
        if line.startswith(('data: {"error"', 'data: {"type":"error"')):
            code = _code(line.removeprefix("data: "))
            if code in _FAULTS:
                wrong.append(f"{code} in a stream")
    return wrong


def _code(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["code"] if "code" in error else error["type"])
    except (ValueError, KeyError, TypeError):
        return "no error body"
