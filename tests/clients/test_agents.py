"""OpenAI's Agents SDK on Responses: a run with a tool, and a turn that continues it."""

from pathlib import Path

import pytest

from tests.http.edge import edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL

agents = pytest.importorskip("agents", reason="make test-clients has it")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_run_calls_its_tool_and_is_continued(tmp_path: Path, streamed: bool) -> None:
    asked = []

    def weather(city: str) -> str:
        """Tells the weather of a city."""
        asked.append(city)
        node.says = "It rains."
        return "rain"

    agents.set_tracing_disabled(True)
    async with edge(tmp_path) as http:
        node = await thinking(http, f"<think>Well.</think>{CALL}")
        client = agents.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0)
        model = agents.OpenAIResponsesModel(model="chat", openai_client=client)
        agent = agents.Agent(
            name="a",
            model=model,
            tools=[agents.function_tool(weather)],
            model_settings=agents.ModelSettings(max_tokens=200),
        )
        if streamed:
            run = agents.Runner.run_streamed(agent, "hi")
            _ = [event async for event in run.stream_events()]
        else:
            run = await agents.Runner.run(agent, "hi")
        assert (asked, run.final_output) == (["Bern"], "It rains.")
        node.says = "Yes."
        by_items = await agents.Runner.run(
            agent, [*run.to_input_list(), {"role": "user", "content": "?"}]
        )
        by_id = await agents.Runner.run(agent, "?", previous_response_id=run.last_response_id)
        assert by_items.final_output == by_id.final_output == "Yes."
        await client.close()
