"""Drawn calls of each protocol: the models of its official client take every answer, strictly.

A hundred calls each; 2,000 where `MESH_DEEP` is set. Each client has an environment of its own, in
which the others' cases are skipped.
"""

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.ids import NodeId
from mesh.domain.model import Task
from tests.controller.live import EMBEDS, SPEC
from tests.http.edge import HELLO, edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL, TOOL

DEEP = bool(os.environ.get("MESH_DEEP"))
CALLS = 2000 if DEEP else 100
AT_ONCE = 5
MESSAGE_TOKENS = (1, 4, 16, 64)
"""So many tokens of an answer its node tells at a time."""
SAYS = (
    "Yes.",
    "<think>Well.</think>Yes.",
    f"<think>Well.</think>I look.\n{CALL}\n{CALL}",
    CALL,
    '"quoted" \\ and\n',
)
"""What the model says."""
Choices = Mapping[str, tuple[Any, ...]]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION: dict[str, Any] = TOOL["function"]  # type: ignore[assignment]
SAMPLING: Choices = {"temperature": (0, 0.5), "top_p": (0.5, 1), "stream": (True, False)}
CHAT: Choices = {
    **SAMPLING,
    "max_tokens": (1, 5),
    "stop": ("e", ["I", "x"]),
    "seed": (1,),
    "n": (1, 3),
    "logprobs": (True,),
    "stream_options": ({"include_usage": True}, None),
    "response_format": (
        {"type": "json_object"},
        {"type": "text"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ),
    "extra_body": ({"prompt_logprobs": 1, "stream": False}, {"min_tokens": 1}),
}
TOOLS: Choices = {
    **SAMPLING,
    "tools": ([TOOL],),
    "max_tokens": (5, 200),
    "n": (1, 2),
    "tool_choice": ("auto", "none", {"type": "function", "function": {"name": "weather"}}),
    "parallel_tool_calls": (True, False),
}
COMPLETIONS: Choices = {
    **SAMPLING,
    "prompt": ("hi", [104, 105], ["a", "b"]),
    "max_tokens": (1, 5),
    "logprobs": (0, 2),
    "n": (1, 2),
    "best_of": (2, 3),
    "echo": (True, False),
    "stream_options": ({"include_usage": True}, None),
}
RESPONSES: Choices = {
    **SAMPLING,
    "input": ("hi", HELLO),
    "instructions": ("Be brief.",),
    "max_output_tokens": (1, 200),
    "metadata": ({"a": "b"},),
    "store": (True, False),
    "tools": ([{"type": "function", **FUNCTION}],),
    "reasoning": ({"effort": "none"}, {"effort": "high", "summary": "auto"}),
    "include": (["message.output_text.logprobs"],),
    "text": (
        {"format": {"type": "text"}},
        {"verbosity": "low"},
        {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    ),
}
EMBEDDINGS: Choices = {
    "input": ("a", ["a", "bc"], [104, 105], [[104], [105]]),
    "encoding_format": ("float",),  # What is asked for as base64 its model has no type for.
    "user": ("me",),
}
MESSAGES: Choices = {
    "stream": (True, False),
    "max_tokens": (1, 5, 200),
    "extra_body": ({"temperature": 0.5}, {"top_p": 0.5, "top_k": 40}),
    "system": ("Be brief.", [{"type": "text", "text": "Be brief."}]),
    "stop_sequences": (["e"], ["I", "x"]),
    "tools": ([{"name": "weather", "input_schema": FUNCTION["parameters"]}],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}),
    "metadata": ({"user_id": "me"},),
    "output_config": ({"format": {"type": "json_schema", "schema": SCHEMA}},),
}
OPTIONS = (
    {"num_predict": 3},
    {"temperature": 0, "seed": 1, "stop": ["e"]},
    {"top_k": 5, "top_p": 0.5, "num_ctx": 512},
)
OLLAMA: Choices = {
    "stream": (True, False),
    "options": OPTIONS,
    "format": ("json", SCHEMA, ""),
    "think": (True, False, "low"),
    "logprobs": (True,),
    "keep_alive": ("5m", 0),
}


def openai(url: str) -> Any:
    return pytest.importorskip("openai").AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0
    )


def anthropic(url: str) -> Any:
    return pytest.importorskip("anthropic").AsyncAnthropic(
        base_url=url, api_key="none", max_retries=0
    )


def ollama(url: str) -> Any:
    return pytest.importorskip("ollama").AsyncClient(host=url)


def told_by_openai(refused: Any) -> bool:
    return all(refused.body[name] for name in ("message", "type", "code"))


def told_by_anthropic(refused: Any) -> bool:
    error = refused.body["error"]
    return bool(refused.body["type"] == "error" and error["type"] and error["message"])


def told_by_ollama(refused: Any) -> bool:
    return refused.status_code == 400 and bool(refused.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How a protocol is called by its official client."""

    package: str
    client: Callable[[str], Any]
    method: str
    base: Mapping[str, Any]
    choices: Choices
    model: str = "chat"
    refuses: Callable[[Any], bool] = told_by_openai
    """Whether an error has the protocol's own shape."""


PROTOCOLS = {
    "chat": Protocol(
        package="openai",
        client=openai,
        method="chat.completions.create",
        base={"messages": HELLO},
        choices=CHAT,
    ),
    "tools": Protocol(
        package="openai",
        client=openai,
        method="chat.completions.create",
        base={"messages": HELLO},
        choices=TOOLS,
    ),
    "completions": Protocol(
        package="openai",
        client=openai,
        method="completions.create",
        base={"prompt": "hi"},
        choices=COMPLETIONS,
    ),
    "responses": Protocol(
        package="openai",
        client=openai,
        method="responses.create",
        base={"input": "hi"},
        choices=RESPONSES,
    ),
    "embeddings": Protocol(
        package="openai",
        client=openai,
        method="embeddings.create",
        base={"input": "hi"},
        choices=EMBEDDINGS,
        model=EMBEDS,
    ),
    "messages": Protocol(
        package="anthropic",
        client=anthropic,
        method="messages.create",
        base={"messages": HELLO, "max_tokens": 9},
        choices=MESSAGES,
        refuses=told_by_anthropic,
    ),
    "ollama-chat": Protocol(
        package="ollama",
        client=ollama,
        method="chat",
        base={"messages": HELLO},
        choices={**OLLAMA, "tools": ([TOOL],)},
        refuses=told_by_ollama,
    ),
    "ollama-generate": Protocol(
        package="ollama",
        client=ollama,
        method="generate",
        base={"prompt": "hi"},
        choices={**OLLAMA, "raw": (True,), "system": ("Be brief.",)},
        refuses=told_by_ollama,
    ),
    "ollama-embed": Protocol(
        package="ollama",
        client=ollama,
        method="embed",
        base={"input": "hi"},
        choices={"input": ("a", ["a", "bc"]), "truncate": (True,), "options": ({},)},
        model=EMBEDS,
        refuses=told_by_ollama,
    ),
}


def strict(answer: Any) -> None:
    """Its model takes all of it, without a coercion. Completions have nulls where the service
    sends them, too, and where the model knows of none: amid a stream, and for a prompt's first
    token.
    """
    if getattr(answer, "object", "") == "text_completion":
        for choice in answer.choices:
            choice.finish_reason = choice.finish_reason or "stop"
            if choice.logprobs is not None and None in choice.logprobs.token_logprobs:
                assert choice.logprobs.token_logprobs.pop(0) is None
                assert choice.logprobs.top_logprobs is None or not choice.logprobs.top_logprobs.pop(
                    0
                )
    type(answer).model_validate(answer.model_dump(by_alias=True), strict=True)


def drawn(of: Protocol, draw: random.Random) -> dict[str, Any]:
    """What a call asks for."""
    members = {key: draw.choice(c) for key, c in of.choices.items() if draw.random() < 0.4}
    asked = {"model": of.model, **of.base, **members}
    if not asked.get("stream") or "extra_body" in asked:
        asked.pop("stream_options", None)
    return asked


@pytest.mark.timeout(3600 if DEEP else 600)
@pytest.mark.parametrize("name", PROTOCOLS)
async def test_its_models_take_every_answer(tmp_path: Path, name: str) -> None:
    of = PROTOCOLS[name]
    package = pytest.importorskip(of.package, reason="make test-clients has it")
    draw = random.Random(43)
    answered = 0
    async with edge(tmp_path) as http:
        node = await thinking(http, SAYS[0])
        if of.model == EMBEDS:
            await http.cell.node(node_id=NodeId("n2"), run_id="run-2", embeds=True)
            await http.cell.ask(
                http.cell.client.deploy, replace(SPEC, name=EMBEDS, task=Task.EMBED)
            )
        client = create = of.client(http.url)
        for part in of.method.split("."):
            create = getattr(create, part)
        refusal = package.ResponseError if of.package == "ollama" else package.BadRequestError

        async def ask(asked: dict[str, Any]) -> bool:
            """Whether it was answered, and not refused."""
            try:
                answer = await create(**asked)
                if hasattr(answer, "model_dump"):
                    strict(answer)
                else:
                    async for event in answer:
                        strict(event)
            except refusal as refused:
                if not of.refuses(refused):
                    pytest.fail(f"{asked} was refused by {refused!r}")
                return False
            except ValueError as error:
                raise AssertionError(f"{asked} of {node.says!r}: {error}") from error
            return True

        async with client:
            for _ in range(CALLS // AT_ONCE):
                node.says, node.message_tokens = draw.choice(SAYS), draw.choice(MESSAGE_TOKENS)
                asked = (ask(drawn(of, draw)) for _ in range(AT_ONCE))
                answered += sum(await asyncio.gather(*asked))
    assert answered > CALLS / 2
