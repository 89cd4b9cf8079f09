"""PydanticAI on three protocols: a run with a tool, streamed and not, and an answer of a type."""

from pathlib import Path
from typing import Any

import pytest

from tests.http.edge import edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL

pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-clients has it")


openai_models = pytest.importorskip("pydantic_ai.models.openai")
anthropic_models = pytest.importorskip("pydantic_ai.models.anthropic")
providers = pytest.importorskip("pydantic_ai.providers")


def provider(name: str, url: str) -> Any:
    return providers.infer_provider_class(name)(base_url=url, api_key="none")


def chat(url: str) -> Any:
    return openai_models.OpenAIChatModel("chat", provider=provider("openai", f"{url}/v1"))


def responses(url: str) -> Any:
    return openai_models.OpenAIResponsesModel("chat", provider=provider("openai", f"{url}/v1"))


def messages(url: str) -> Any:
    return anthropic_models.AnthropicModel("chat", provider=provider("anthropic", url))


@pytest.mark.parametrize("model", [chat, responses, messages])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_run_calls_its_tool(tmp_path: Path, model: Any, streamed: bool) -> None:
    asked = []

    def weather(city: str) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        node.says = "It rains."
        return "rain"

    # Without being asked to, no model thinks by Messages.
    says = CALL if model is messages else f"<think>Well.</think>{CALL}"
    async with edge(tmp_path) as http:
        node = await thinking(http, says)
        agent = pydantic_ai.Agent(
            model(http.url), tools=[weather], model_settings={"max_tokens": 200}
        )
        if streamed:
            async with agent.run_stream("hi") as run:
                told = "".join([part async for part in run.stream_text(delta=True)])
            usage = run.usage
        else:
            result = await agent.run("hi")
            told, usage = result.output, result.usage
        assert (asked, told) == (["Bern"], "It rains.")
        assert usage.output_tokens == len(says) + len("It rains.")
        await agent.model.client.close()


@pytest.mark.parametrize("model", [chat, responses])
async def test_an_answer_is_of_the_type_that_was_asked_for(tmp_path: Path, model: Any) -> None:
    async with edge(tmp_path) as http:
        await thinking(http, '{"response": 7}')
        agent = pydantic_ai.Agent(
            model(http.url),
            output_type=pydantic_ai.NativeOutput(int),
            model_settings={"max_tokens": 100},
        )
        assert (await agent.run("hi")).output == 7
        await agent.model.client.close()
