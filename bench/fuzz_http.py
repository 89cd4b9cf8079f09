"""Asks each operation of the served schema: what fits it, what does not, and what is no JSON.

Before: a running cell, and `drawn_json`. After: `Findings`. Undocumented is a status that the
schema does not have, an answer that its schema does not take, and a fault of ours, whether it is
the status or comes later, in a stream. Half of the bodies are a call that would be answered, with a
few members drawn: whole drawn ones hardly ever pass the first check.
"""

import json
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import quote, urlencode

import requests
from jsonschema import Draft202012Validator

from bench.drawn_json import Drawing
from bench.fuzz_protocols import CALL_S_MAX, Findings

_SHARES = {
    "/v1/chat/completions": 0.15,
    "/v1/completions": 0.15,
    "/v1/messages": 0.1,
    "/v1/messages/count_tokens": 0.05,
    "/v1/responses": 0.15,
    "/api/chat": 0.05,
    "/api/generate": 0.05,
    "/api/embed": 0.02,
    "/api/show": 0.02,
    "/v1/embeddings": 0.05,
    "/v1/rerank": 0.05,
    "/v1/responses/input_tokens": 0.05,
    "/v1/models/{model}": 0.01,
    "/v1/responses/{id}": 0.02,
    "/v1/batches": 0.02,
    "/v1/batches/{id}": 0.01,
    "/v1/files": 0.01,
    "/tokenize": 0.05,
    "/detokenize": 0.03,
}
"""The shares of the cases; paths without anything to vary get a few."""
_FEW = 2
_WORDS = [{"role": "user", "content": "hi"}]
_SAID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _WORDS, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/messages": {"messages": _WORDS, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": _WORDS},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/api/chat": {"messages": _WORDS, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 4}},
    "/api/show": {},
    "/api/embed": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    **{f"{at}/rerank": {"query": "hi", "documents": ["ho"]} for at in ("", "/v1", "/v2")},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
"""Calls that are answered."""
_OTHERS_MAX = 3
"""At most so many members of such a call are drawn."""
_TYPED = {"type", "anyOf", "oneOf", "$ref", "enum", "const"}
"""The keywords of which a schema has one that says a type."""
_AT_ONCE = 4
_IDS_KEPT = 32
"""So many ids of the last responses are drawn among other texts."""
_REFUSALS = frozenset(
    {"no_node", "node_lost", "shutting_down", "unavailable", "load_failed", "overloaded_error"}
)
"""The codes of documented refusals from 500 on; a cell whose node is well has no others."""
_FAULTS = frozenset({"internal_error", "engine_failed", "api_error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`names` are the deployments that may be asked, `said` a call that one of them answers."""

    method: str
    path: str
    names: Sequence[str]
    said: Mapping[str, Any]
    body: Mapping[str, Any] | None
    """The schema of its bodies."""
    parameters: Sequence[Mapping[str, Any]]
    answers: Mapping[str, Draft202012Validator | None]
    """By status, what checks an answer that is JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    operation: Operation
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None


def operations(
    document: Mapping[str, Any], chats: Sequence[str], embeds: Sequence[str]
) -> list[Operation]:
    """Those of an OpenAPI document; `embeds` are for paths that embed or rank."""
    found = []
    for path, methods in document["paths"].items():
        of_vectors = path.endswith(("rerank", "/embeddings", "/embed"))
        for method, raw in methods.items():
            content = raw.get("requestBody", {}).get("content", {})
            found.append(
                Operation(
                    method=method.upper(),
                    path=path,
                    names=embeds if of_vectors else chats,
                    said=_SAID.get(path, {}),
                    body=content.get("application/json", {}).get("schema"),
                    parameters=raw.get("parameters", ()),
                    answers={
                        status: _checks(answer, document)
                        for status, answer in raw["responses"].items()
                    },
                )
            )
    return found


def _checks(answer: Mapping[str, Any], document: Mapping[str, Any]) -> Draft202012Validator | None:
    content = answer.get("content", {}).get("application/json")
    if content is None:
        return None
    return Draft202012Validator({**content["schema"], "components": document["components"]})


def cases(
    operation: Operation, draw: random.Random, drawing: Drawing, count: int
) -> Iterator[Case]:
    """The same for the same random numbers."""
    for _ in range(count):
        path, headers, query = operation.path, dict[str, str](), dict[str, str]()
        for one in operation.parameters:
            drawn = drawing.fitting(one["schema"]) if draw.random() < 0.8 else drawing.anything()
            text = draw.choice(operation.names) if draw.random() < 0.2 else str(drawn)
            if one["in"] == "path":
                path = path.replace(f"{{{one['name']}}}", quote(text or "x", errors="replace"))
            elif one["in"] == "query":
                query[one["name"]] = text
            elif draw.random() < 0.1:
                headers[one["name"]] = quote(text, errors="replace")
        path += f"?{urlencode(query, errors='replace')}" if query else ""
        if operation.body is None:
            yield Case(operation=operation, path=path, headers=headers)
            continue
        kind = "application/json" if draw.random() < 0.99 else drawing.text()
        headers["Content-Type"] = quote(kind, safe="/", errors="replace")
        body = _body(operation, operation.body, draw, drawing)
        yield Case(operation=operation, path=path, headers=headers, body=body)


def _body(
    operation: Operation, schema: Mapping[str, Any], draw: random.Random, drawing: Drawing
) -> bytes:
    schema = drawing.resolved(schema)
    whole = draw.random() < 0.5
    if whole:
        body = drawing.fitting(schema)
    else:
        # A member of any type is ignored, or refused by its name.
        typed = [name for name, one in schema["properties"].items() if one.keys() & _TYPED]
        drawn = draw.sample(typed, draw.randint(0, min(_OTHERS_MAX, len(typed))))
        body = {**operation.said, **drawing.members(schema, drawn)}
    if draw.random() < 0.9 and "model" in schema["properties"]:
        body["model"] = draw.choice(operation.names)
    wrong = draw.random()
    if wrong < 0.3:
        body = drawing.damaged(json.loads(json.dumps(body)))
    elif wrong < 0.32:
        body = drawing.anything()
    raw = json.dumps(body).encode()
    if wrong > 0.97:
        at = draw.randrange(len(raw) + 1)
        raw = raw[:at] + draw.randbytes(draw.randint(0, 4)) + raw[at + draw.randint(0, 8) :]
    return raw


def fuzz_http(
    url: str, chats: Sequence[str], embeds: Sequence[str], *, cases_max: int, seeded: int
) -> Findings:
    """`chats` and `embeds` are the deployments of these tasks. Several calls are open at a time."""
    draw, findings = random.Random(seeded), Findings()
    ids: deque[str] = deque(maxlen=_IDS_KEPT)
    with requests.Session() as session, ThreadPoolExecutor(_AT_ONCE) as pool:
        document = session.get(f"{url}/openapi.json", timeout=CALL_S_MAX).json()
        drawing = Drawing(draw, document["components"]["schemas"], ids)
        for operation in operations(document, chats, embeds):
            share = _SHARES.get(operation.path, 0.0)
            drawn = cases(operation, draw, drawing, max(_FEW, round(cases_max * share)))
            while some := list(islice(drawn, _AT_ONCE * 4)):
                answers = pool.map(partial(_asked, session, url), some)
                for case, answer in zip(some, answers, strict=True):
                    _judge(case, answer, ids, findings)
    return findings


def _asked(
    session: requests.Session, url: str, case: Case
) -> requests.Response | requests.RequestException:
    try:
        return session.request(
            case.operation.method,
            url + case.path,
            data=case.body,
            headers=case.headers,
            timeout=CALL_S_MAX,
        )
    except requests.RequestException as error:
        return error


def _judge(
    case: Case,
    answer: requests.Response | requests.RequestException,
    ids: "deque[str]",
    findings: Findings,
) -> None:
    what = f"{case.operation.method} {case.path} {case.headers!r} {case.body!r}"
    match answer:
        case requests.Timeout():
            findings.ended("timeout")
            findings.hung(what)
        case requests.RequestException():
            findings.ended("disconnected")
            findings.unexpected(f"{answer} for {what}")
        case requests.Response():
            findings.ended(str(answer.status_code))
            found = re.search(r'"id":"(resp_[^"]+)"', answer.text)
            ids.extend(found.groups() if found else ())
            for wrong in wrong_in(case.operation, answer):
                findings.unexpected(f"{answer.status_code} {wrong} for {what}")


def wrong_in(operation: Operation, response: requests.Response) -> list[str]:
    """What of an answer is not documented."""
    if str(response.status_code) not in operation.answers:
        return [f"is no status of the schema, {response.text[:200]!r}"]
    wrong = []
    checks = operation.answers[str(response.status_code)]
    if response.headers.get("content-type", "").startswith("application/json") and checks:
        wrong = [error.message[:200] for error in checks.iter_errors(response.json())]
    if response.status_code >= 500 and (code := _code(response.text)) not in _REFUSALS:
        wrong.append(f"{code} is no refusal, {response.text[:200]!r}")
    for line in response.text.splitlines():
        if line.startswith(('data: {"error"', 'data: {"type":"error"')):
            code = _code(line.removeprefix("data: "))
            if code in _FAULTS:
                wrong.append(f"{code} in a stream, {line[:200]!r}")
    return wrong


def _code(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["code"] if "code" in error else error["type"])
    except (ValueError, KeyError, TypeError):
        return "no error body"
