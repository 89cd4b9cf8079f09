"""LiteLLM, by its provider for servers like OpenAI's: answers, streams, its classes of errors.

Its own threads and loops outlive each test, so the environment of this one lets warnings pass.
"""

import asyncio
from typing import Any

import pytest

from mesh.domain.messages import SubmitRequest
from tests.clients.conftest import CALLS_MAX, Served

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm", reason="make test-clients has it")


def asking(served: Served, **more: Any) -> dict[str, Any]:
    given = {"model": "openai/chat", "messages": HELLO, "api_base": served.url, "api_key": "none"}
    return {**given, "max_retries": 0, **more}


async def test_answers_whole_and_streamed(litellm: Any, served: Served) -> None:
    whole = await asyncio.to_thread(litellm.completion, **asking(served, max_tokens=3))
    assert whole.choices[0].message.content == "aaa"

    def streamed() -> str:
        stream = litellm.completion(**asking(served, max_tokens=3, stream=True))
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(streamed) == "aaa"


async def test_errors_are_of_its_classes(litellm: Any, served: Served) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    with pytest.raises(litellm.ContextWindowExceededError):
        await asyncio.to_thread(litellm.completion, **asking(served, messages=long))
    with pytest.raises(litellm.NotFoundError):
        await asyncio.to_thread(litellm.completion, **asking(served, model="openai/chta"))
    with pytest.raises(litellm.BadRequestError):
        await asyncio.to_thread(litellm.completion, **asking(served, n=1000))


async def test_a_refusal_is_a_rate_limit(litellm: Any, served: Served) -> None:
    served.node.held = True

    held = [
        asyncio.create_task(asyncio.to_thread(litellm.completion, **asking(served, max_tokens=1)))
        for _ in range(CALLS_MAX)
    ]
    await served.cell.until(lambda: len(served.cell.client.requests()) == CALLS_MAX)
    with pytest.raises(litellm.RateLimitError):
        await asyncio.to_thread(litellm.completion, **asking(served))
    served.node.held = False
    for command in [c for c in served.node.commands if isinstance(c, SubmitRequest)]:
        await served.node.answer(command.order, 0, 1, last=True)
    await asyncio.gather(*held)
