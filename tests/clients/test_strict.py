"""A hundred drawn calls of each of OpenAI's protocols: its client's models take every answer."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.http.edge import HELLO, edge
from tests.http.test_thoughts import thinking
from tests.http.test_tools import CALL, TOOL

openai = pytest.importorskip("openai", reason="make test-clients has it")
CALLS = 100
SAYS = (
    "Yes.",
    "<think>Well.</think>Yes.",
    f"<think>Well.</think>I look.\n{CALL}\n{CALL}",
    CALL,
    '"quoted" \\ and\n',
)
"""What the model says."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING = {"temperature": (0, 0.5), "top_p": (0.5, 1), "stream": (True, False)}
CHAT: dict[str, tuple[Any, ...]] = {
    **SAMPLING,
    "max_tokens": (1, 5),
    "stop": ("e", ["I", "x"]),
    "seed": (1,),
    "logprobs": (True,),
    "stream_options": ({"include_usage": True}, None),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "extra_body": ({"prompt_logprobs": 1, "stream": False}, {"min_tokens": 1}),
}
TOOLS: dict[str, tuple[Any, ...]] = {
    **SAMPLING,
    "tools": ([TOOL],),
    "max_tokens": (5, 200),
    "parallel_tool_calls": (True, False),
}
COMPLETIONS: dict[str, tuple[Any, ...]] = {
    **SAMPLING,
    "prompt": ("hi", [104, 105], ["a", "b"]),
    "max_tokens": (1, 5),
    "logprobs": (0, 2),
    "echo": (True, False),
    "stream_options": ({"include_usage": True}, None),
}
FLAT = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
RESPONSES: dict[str, tuple[Any, ...]] = {
    **SAMPLING,
    "input": ("hi", HELLO),
    "instructions": ("Be brief.",),
    "max_output_tokens": (1, 200),
    "metadata": ({"a": "b"},),
    "store": (True, False),
    "tools": ([FLAT],),
    "reasoning": ({"effort": "none"}, {"effort": "high", "summary": "auto"}),
    "include": (["message.output_text.logprobs"],),
    "text": ({"format": {"type": "text"}}, {"verbosity": "low"}),
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


@pytest.mark.parametrize(
    ("path", "base", "choices"),
    [
        ("chat.completions", {"messages": HELLO}, CHAT),
        ("chat.completions", {"messages": HELLO}, TOOLS),
        ("completions", {"prompt": "hi"}, COMPLETIONS),
        ("responses", {"input": "hi"}, RESPONSES),
    ],
)
async def test_its_models_take_every_answer(
    tmp_path: Path, path: str, base: dict[str, Any], choices: dict[str, tuple[Any, ...]]
) -> None:
    draw = random.Random(43)
    answered = 0
    async with (
        edge(tmp_path) as http,
        openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client,
    ):
        node = await thinking(http, SAYS[0])
        resource = client
        for name in path.split("."):
            resource = getattr(resource, name)
        for _ in range(CALLS):
            node.says = draw.choice(SAYS)
            drawn = {name: draw.choice(of) for name, of in choices.items() if draw.random() < 0.4}
            asked = {"model": "chat", **base, **drawn}
            if not asked.get("stream") or "extra_body" in asked:
                asked.pop("stream_options", None)
            try:
                answer = await resource.create(**asked)
            except openai.BadRequestError as refused:
                strict_error = refused.body
                assert isinstance(strict_error, dict), asked
                assert strict_error["message"], asked
                continue
            answered += 1
            if hasattr(answer, "model_dump"):
                strict(answer)
            else:
                async for event in answer:
                    strict(event)
    assert answered > CALLS / 2
