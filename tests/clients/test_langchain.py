"""LangChain's own integration tests of a chat model, by its clients for OpenAI's protocol and for
Anthropic's, on a real cell.

The demo model is given a chat template with tools, which it was not trained on: what it says makes
little sense, but calls that are required and structured answers keep to their grammars. Cases that
need more wit than it has may fail, by an assertion of theirs alone: an error of the protocol fails.
By themselves the cases skip images, audio, PDF, Anthropic's messages and a recording to measure by.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mesh_loader.store import StoredModel
from tests.clients.conftest import CALL_S_MAX, demo_cell

pytestmark = pytest.mark.timeout(300)
WITH = "make test-clients has it"
langchain_openai = pytest.importorskip("langchain_openai", reason=WITH)
langchain_anthropic = pytest.importorskip("langchain_anthropic", reason=WITH)
LangChains: Any = pytest.importorskip(
    "langchain_tests.integration_tests", reason=WITH
).ChatModelIntegrationTests
OutputParserException = pytest.importorskip("langchain_core.exceptions").OutputParserException

TEMPLATE = Path(__file__).with_name("hermes.jinja")
DEPLOYMENTS = ("chat", "chat-too")
TOKENS, TOKENS_WHOLE = 48, 512
"""The most tokens of an answer: of one that may be cut anywhere, and of one that must be whole. Of
JSON a grammar bounds the blanks, but no text, in which the demo model may repeat itself for long.
"""
WHOLE = ("test_bind_runnables", "test_structured_output", "test_tool_c", "test_unicode")
"""Cases whose answers follow a grammar to its end, by the beginning of their names."""
BEYOND_IT = {
    "test_agent_loop": "the demo model calls no tool of its own accord",
    "test_json_mode": "the demo model does not choose the keys that it is told in words",
    "test_unicode_tool_call_integration": "the demo model does not copy Chinese and Japanese",
}
"""Cases by what they ask of the model, not of the protocol."""
SEVERAL = "where the demo model may call several tools, it does"
BEYOND_ANTHROPIC = {
    **BEYOND_IT,
    "test_tool_calling": SEVERAL,
    "test_tool_calling_async": SEVERAL,
    "test_tool_calling_with_no_arguments": SEVERAL,
}


@pytest.fixture(scope="module", autouse=True)
def url(smollm2_model: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home = tmp_path_factory.mktemp("langchain")
    with demo_cell(home, smollm2_model, DEPLOYMENTS, TEMPLATE) as url:
        TestMesh.url = TestMessages.url = url
        yield


@pytest.fixture(autouse=True)
def wit(request: pytest.FixtureRequest) -> None:
    """How much a case may cost, and whether it may fail."""
    case = request.node.originalname
    reason = request.cls.beyond.get(case)
    request.cls.tokens_max = TOKENS_WHOLE if case.startswith(WHOLE) else TOKENS
    if reason is not None:
        raises = (AssertionError, OutputParserException)
        request.applymarker(pytest.mark.xfail(reason=reason, raises=raises, strict=False))


class TestMesh(LangChains):  # type: ignore[misc]
    beyond = BEYOND_IT
    url: ClassVar[str]
    tokens_max: ClassVar[int]

    @property
    def chat_model_class(self) -> Any:
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": DEPLOYMENTS[0],
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "temperature": 0.7,
            "seed": 2,
            "max_tokens": self.tokens_max,
            # Where it may make several, it does.
            "model_kwargs": {"parallel_tool_calls": False},
            "stream_usage": True,
            "timeout": CALL_S_MAX,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return DEPLOYMENTS[1]

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        """Else some schemas allow further members, and the model goes on with them."""
        return {"strict": True}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestMessages(LangChains):  # type: ignore[misc]
    beyond = BEYOND_ANTHROPIC
    url: ClassVar[str]
    tokens_max: ClassVar[int]

    @property
    def chat_model_class(self) -> Any:
        return langchain_anthropic.ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": DEPLOYMENTS[0],
            "base_url": self.url,
            "api_key": "none",
            "temperature": 0.7,
            "max_tokens": self.tokens_max,
            "timeout": CALL_S_MAX,
            "max_retries": 0,
        }

    @property
    def model_override_value(self) -> str:
        return DEPLOYMENTS[1]
