"""LlamaIndex, by its clients for servers like OpenAI's: chats, completions, tools, embeddings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.ids import NodeId
from mesh.domain.model import Task
from tests.clients.conftest import Served
from tests.controller.live import EMBEDS, SPEC, VECTOR
from tests.http.edge import edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL

WITH = "make test-clients has it"
llms = pytest.importorskip("llama_index.llms.openai_like", reason=WITH)
embeddings = pytest.importorskip("llama_index.embeddings.openai_like", reason=WITH)
core = pytest.importorskip("llama_index.core.llms", reason=WITH)
tools = pytest.importorskip("llama_index.core.tools", reason=WITH)


def asked_at(url: str, **more: Any) -> Any:
    given: dict[str, Any] = {"model": "chat", "api_base": url, "api_key": "none", "max_retries": 0}
    return llms.OpenAILike(**{**given, "is_chat_model": True, "context_window": 512, **more})


async def test_chats_and_completions_whole_and_streamed(served: Served) -> None:
    hello = [core.ChatMessage(role="user", content="hi")]
    for is_chat in (True, False):
        model = asked_at(served.url, is_chat_model=is_chat, max_tokens=3)
        assert (await model.achat(hello)).message.content == "aaa"
        pieces = [piece.delta async for piece in await model.astream_chat(hello)]
        assert "".join(pieces) == "aaa"
        assert (await model.acomplete("hi")).text == "aaa"


async def test_a_function_is_called(tmp_path: Path) -> None:
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"rain in {city}"

    async with edge(tmp_path) as http:
        await thinking(http, CALL)
        model = asked_at(f"{http.url}/v1", is_function_calling_model=True, max_tokens=200)
        tool = tools.FunctionTool.from_defaults(fn=weather)
        told = await model.apredict_and_call([tool], user_msg="hi")
        assert str(told) == "rain in Bern"


async def test_embeddings(served: Served) -> None:
    await served.cell.node(node_id=NodeId("n2"), run_id="run-2", embeds=True)
    spec = replace(SPEC, name=EMBEDS, task=Task.EMBED)
    await served.cell.ask(served.cell.client.deploy, spec)
    model = embeddings.OpenAILikeEmbedding(
        model_name=EMBEDS, api_base=served.url, api_key="none", max_retries=0
    )
    told = await model.aget_text_embedding_batch(["a", "bc"])
    assert told == [pytest.approx(VECTOR)] * 2
