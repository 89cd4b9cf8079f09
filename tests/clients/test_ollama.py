"""Ollama's own client for Python: whole and streamed, tools, what it lists, its errors."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Served
from tests.http.edge import edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL

ollama = pytest.importorskip("ollama", reason="make test-clients has it")
HELLO = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "chat", "options": {"num_predict": 3}}


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Any]:
    async with ollama.AsyncClient(host=served.url.removesuffix("/v1")) as client:
        yield client


async def test_chats_and_prompts_whole_and_streamed(client: Any) -> None:
    whole = await client.chat(**ASKED, messages=HELLO)
    assert (whole.message.content, whole.done_reason, whole.eval_count) == ("aaa", "length", 3)
    pieces = [piece async for piece in await client.chat(**ASKED, messages=HELLO, stream=True)]
    assert "".join(piece.message.content for piece in pieces) == "aaa"
    assert [piece.done for piece in pieces] == [False, False, False, True]
    answer = await client.generate(**ASKED, prompt="hi", logprobs=True, top_logprobs=2)
    assert (answer.response, len(answer.logprobs)) == ("aaa", 3)


async def test_a_function_of_python_is_a_tool(tmp_path: Path) -> None:
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
          city: where it is.
        """
        return "rain"

    async with edge(tmp_path) as http, ollama.AsyncClient(host=http.url) as client:
        node = await thinking(http, f"<think>Well.</think>{CALL}")
        asked: dict[str, Any] = {"model": "chat", "tools": [weather], "think": True}
        told = await client.chat(**asked, messages=HELLO)
        (call,) = told.message.tool_calls
        assert (told.message.thinking, call.function.arguments) == ("Well.", {"city": "Bern"})
        node.says = "It rains."
        result = {"role": "tool", "tool_name": "weather", "content": weather("Bern")}
        answer = await client.chat(**asked, messages=[*HELLO, told.message, result])
        assert answer.message.content == "It rains."


async def test_it_lists_models_and_is_told_why_it_may_not_pull(client: Any) -> None:
    assert [one.model for one in (await client.list()).models] == ["chat"]
    await client.chat(**ASKED, messages=HELLO)
    assert [one.model for one in (await client.ps()).models] == ["chat"]
    assert (await client.show("chat")).capabilities == ["completion"]
    for call, status in ((client.pull("x"), 400), (client.chat("chta", HELLO), 404)):
        with pytest.raises(ollama.ResponseError) as refused:
            await call
        assert refused.value.status_code == status
