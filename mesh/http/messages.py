"""What clients of Anthropic's Messages send, read as a conversation of OpenAI's protocol.

Before: `generation` or `tokens`, which have the bytes. After: `asking`, as for a chat. What shapes
the answer's wording alone, and no model here knows, is ignored; other members that are not built
are refused by their names.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mesh.domain.errors import InvalidInput
from mesh.http.asking import check_built
from mesh.http.bodies import (
    ChatBody,
    Message,
    TextPart,
    assistant_message,
    chat_body,
    json_format,
    message,
    read,
)
from mesh.http.members import copied
from mesh.http.tools import (
    NAME,
    TOOLS_MAX,
    CacheControl,
    Strict,
    ToolCall,
    ToolChoice,
    function_tool,
    named_tool,
    tool_call,
)


class TextBlock(TextPart):
    citations: Any = Field(default=None, description="Ignored, as is the next one.")
    parsed_output: Any = None


class ThinkingBlock(Strict):
    """What an assistant thought, as it was told; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """A thought that only the service which made it can read: ignored."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = Field(default=None, description="Ignored.")
    cache_control: CacheControl = None


def _shape(value: Any) -> str:
    return "blocks" if isinstance(value, list) else "text"


Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextBlock], Tag("blocks")], Discriminator(_shape)
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = Field(default=None, description="Ignored: the content says it.")
    cache_control: CacheControl = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")], Discriminator(_shape)
    ]


class OfferedTool(Strict):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of an object.")
    strict: bool | None = Field(
        default=None, description="What required calls cannot be kept to is refused; else left out."
    )
    cache_control: CacheControl = None
    input_examples: Any = Field(default=None, description="Ignored, as are the next ones.")
    allowed_callers: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="Of the tool, where the type is that.")
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Strict):
    """Whether a model that can be told so thinks aloud; how much it thinks is its own affair."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, description="Ignored, as is display.")
    display: Any = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Any = Field(default=None, description="Ignored.")


class Conversation(Strict):
    """Counts the tokens of a conversation."""

    model: str = Field(min_length=1, description="A deployment's name.")
    messages: list[Turn]
    system: Texts | None = None
    thinking: ThinkingConfig | None = Field(default=None, description="Absent: disabled.")
    tools: Annotated[list[OfferedTool], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Choice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    context_management: Any = Field(default=None, description="Ignored: nothing is cleared.")
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    mcp_servers: Any = None


class MessagesBody(Conversation):
    """Answers a conversation of Anthropic's protocol, rendered by the model's chat template."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Any = Field(default=None, description="Ignored, as are the next ones.")
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    container: Any = None


def read_messages(raw: bytes) -> ChatBody:
    """Raises InvalidInput."""
    body = read(MessagesBody, raw)
    return chat_of(body, copied(body, "messages"))


def chat_of(body: Conversation, further: Mapping[str, Any]) -> ChatBody:
    """The same in OpenAI's words, with `further` members. Raises InvalidInput."""
    check_built(body)
    if body.messages and body.messages[-1].role == "assistant":
        raise InvalidInput(
            "messages: an assistant's message cannot be continued; the last one must be a user's",
            field="messages",
        )
    system = [message("system", _text(body.system))] if body.system is not None else []
    choice, wanted = body.tool_choice, body.output_config
    format_ = None
    if wanted is not None and wanted.format is not None:
        format_ = json_format(wanted.format.schema_, strict=True)
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    tools = [
        function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in body.tools or ()
    ]
    return chat_body(
        {
            "model": body.model,
            "messages": [*system, *_turns(body.messages)],
            "chat_template_kwargs": {"enable_thinking": thinks},
            "tools": tools or None,
            "tool_choice": None if choice is None else _choice(choice),
            "parallel_tool_calls": not (choice is not None and choice.disable_parallel_tool_use),
            "response_format": format_,
            **further,
        }
    )


def _turns(turns: Iterable[Turn]) -> Iterator[Message]:
    """Turns of one role that follow each other are one, as the protocol has it."""
    for role, together in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in together for block in _blocks(turn.content)]
        yield from [_assistant(blocks)] if role == "assistant" else _others(role, blocks)


def _blocks(content: str | list[Block]) -> list[Block]:
    if isinstance(content, list):
        return content
    return [TextBlock.model_construct(type="text", text=content)]


def _assistant(blocks: Sequence[Block]) -> Message:
    """Raises InvalidInput."""
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for block in blocks:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thought):
                thoughts.append(thought)
            case ToolUseBlock(id=id_, name=name, input=given):
                calls.append(tool_call(id_, name, json.dumps(given)))
            case ToolResultBlock():
                raise _misplaced(block, "assistant")
    return assistant_message(texts, thoughts, calls)


def _others(role: str, blocks: Sequence[Block]) -> Iterator[Message]:
    """A message for each result of a tool, and one for the texts between them. Raises
    InvalidInput.
    """
    texts = list[str]()
    for block in blocks:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ToolResultBlock() if role == "user":
                if texts:
                    yield message(role, "\n".join(texts))
                    texts.clear()
                content = _text(block.content or "")
                yield message("tool", content, tool_call_id=block.tool_use_id)
            case _:
                raise _misplaced(block, role)
    if texts:
        yield message(role, "\n".join(texts))


def _misplaced(block: Block, role: str) -> InvalidInput:
    return InvalidInput(
        f"messages: a block of type {block.type} cannot be in a message of the role {role}",
        field="messages",
    )


def _text(texts: str | list[TextBlock]) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


def _choice(choice: Choice) -> ToolChoice:
    """Raises InvalidInput."""
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidInput("the body lacks tool_choice.name", field="tool_choice.name")
            return named_tool(choice.name)
