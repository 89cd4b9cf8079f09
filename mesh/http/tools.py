"""Tools of OpenAI's protocol: what a client offers, which of it an answer has to call.

Before: `bodies`, of which these are members. After: `asking`, with what the chat template is given
and the grammar that an answer keeps to.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mesh.domain.errors import InvalidInput
from mesh.domain.invocation import ChatPrompt, Invocation
from mesh.domain.text import ToolFormat
from mesh.domain.values import replace
from mesh.text.schemas import loosened
from mesh.text.tool_calls import calls_grammar, turn_of_calls

TOOLS_MAX = 128
NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class Strict(BaseModel):
    """No number is read from text, none is NaN or infinite, and no member goes unread, unless it is
    null: a client says so that it asks for nothing.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: one for name, one in given.items() if one is not None or name in known}


CacheControl = Annotated[
    Any, Field(exclude=True, description="Ignored: what prompts have in common is cached anyhow.")
]


class Function(Strict):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of an object; absent: it has no arguments."
    )
    strict: bool | None = Field(
        default=None,
        description="Calls that are required keep to the schema; if it is true, to all of it.",
    )
    cache_control: CacheControl = None


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl = None


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Strict):
    name: str
    arguments: str
    parsed_arguments: Any = Field(default=None, description="Ignored: read by a client.")
    provider_specific_fields: Any = None


class ToolCall(Strict):
    """A tool call in an assistant's message that a client sends back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, description="Ignored: of a streamed answer.")
    provider_specific_fields: Any = None
    cache_control: CacheControl = None


Tools = Annotated[list[Tool], Field(max_length=TOOLS_MAX)]


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> Tool:
    function = Function.model_construct(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return Tool.model_construct(type="function", function=function)


def named_tool(name: str) -> NamedTool:
    function = FunctionName.model_construct(name=name)
    return NamedTool.model_construct(type="function", function=function)


def tool_call(id_: str, name: str, arguments: str) -> ToolCall:
    called = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=id_, function=called)


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises InvalidInput for names that come twice, or that nobody has."""
    names = [tool.function.name for tool in tools or ()]
    twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
    if twice is not None:
        raise InvalidInput(f"two tools are called {twice!r}", field="tools")
    if not names and requires_call(choice):
        raise InvalidInput("tool_choice wants a call, and there are no tools", field="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidInput(
            f"tool_choice names {choice.function.name!r}, which is none of the tools",
            hint=f"they are {', '.join(names)}",
            field="tool_choice",
        )


def requires_call(choice: ToolChoice | None) -> bool:
    return choice not in (None, "none", "auto")


def offers_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> bool:
    return bool(tools) and choice != "none"


def with_tools(
    asked: Invocation,
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    form: ToolFormat,
    *,
    several: bool,
    by_tokens: bool,
) -> Invocation:
    """A chat whose template is given the tools, and its answer's grammar where it has to call one:
    `several`, `by_tokens` as `calls_grammar` takes them. Raises InvalidInput where the model's
    template knows of no tools.
    """
    if form is ToolFormat.NONE:
        raise InvalidInput(
            f"the chat template of {asked.deployment!r} calls no tools, or in unknown words",
            hint="send tool_choice: none, or say how its model calls them: spec.tool_format",
            field="tools",
        )
    assert isinstance(asked.prompt, ChatPrompt)
    offered = [tool.model_dump(exclude_none=True) for tool in tools]
    prompt = replace(asked.prompt, tools=json.dumps(offered, ensure_ascii=False))
    if not requires_call(choice):
        return replace(asked, prompt=prompt)
    if asked.grammar is not None:
        raise InvalidInput(
            "an answer can keep to one grammar alone: that of a call that is required is one",
            field="tool_choice",
        )
    named = choice.function.name if isinstance(choice, NamedTool) else None
    schemas = {
        tool.function.name: _schema(tool.function)
        for tool in tools
        if named in (None, tool.function.name)
    }
    several = several and named is None
    grammar = calls_grammar(form, schemas, several=several, by_tokens=by_tokens)
    return replace(asked, prompt=prompt, grammar=grammar)


def _schema(function: Function) -> Any:
    """What the arguments of a call that is required keep to."""
    schema = function.parameters or {"type": "object", "properties": {}}
    return schema if function.strict else loosened(schema)


def calls_of(calls: Sequence[ToolCall]) -> str:
    """As templates take them."""
    return turn_of_calls(
        (call.id, call.function.name, _arguments(call.function.arguments)) for call in calls
    )


def _arguments(text: str) -> Mapping[str, Any] | str:
    """Most templates want an object. What is none stays text: an answer that `max_tokens` has cut
    comes back on every later turn.
    """
    try:
        arguments = json.loads(text or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # JSON can say half a character
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
