"""What clients of OpenAI's Responses send, read as a conversation of its Chat Completions.

A call may continue an earlier one: the items of that are put before its own. Before: `generation`,
which has the bytes. After: `asking`, as for a chat, and `response_answers`, which is told what the
call said. Tools of the hosted service are refused by their names.
"""

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mesh.domain.errors import InvalidInput
from mesh.domain.values import replace
from mesh.http.asking import check_built
from mesh.http.background import Background, Run, Runs, cancel
from mesh.http.bodies import (
    ChatBody,
    Message,
    RefusalPart,
    ResponseFormat,
    StreamOptions,
    assistant_message,
    chat_body,
    check_containers,
    json_format,
    message,
    read,
    validated,
)
from mesh.http.exchange import Bodies, Exchange
from mesh.http.generation import NewWriter
from mesh.http.kept_responses import REFERENCES_MAX, KeptResponses
from mesh.http.members import copied
from mesh.http.refusals import EVENT_STREAM, encoded
from mesh.http.response_answers import DeletedResponse, InputTokens, ResponseWriter, response
from mesh.http.together import Gateway
from mesh.http.tokens import Answered
from mesh.http.tools import (
    NAME,
    TOOLS_MAX,
    Strict,
    Tool,
    ToolCall,
    ToolChoice,
    function_tool,
    named_tool,
    tool_call,
)

LOGPROBS = "message.output_text.logprobs"


class SaidText(Strict):
    """Text of a client, or of an answer that it sends back."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Any = Field(default=None, description="Ignored, as are the next ones.")
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


def _content_shape(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


def _type(value: Any) -> Any:
    """The `type` of a member, whether it is as a client has sent it or was read already."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _part(value: Any) -> str:
    return "refusal_part" if _type(value) == "refusal" else "text_part"


Parts = list[
    Annotated[
        Annotated[SaidText, Tag("text_part")] | Annotated[RefusalPart, Tag("refusal_part")],
        Discriminator(_part),
    ]
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], Discriminator(_content_shape)
]


class Item(Strict):
    id: str | None = Field(default=None, description="Ignored, as are the next ones.")
    status: Any = None
    created_by: Any = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Any = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None
    caller: Any = None
    namespace: None = None


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: Any = None
    caller: Any = None


class ReasoningItem(Item):
    """What an assistant thought: its content, or else its summary."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Any = Field(default=None, description="Ignored: there is none here.")


class ReferenceItem(Strict):
    """An item of an answer that is kept."""

    type: Literal["item_reference"] = "item_reference"
    id: str


_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind(value: Any) -> str:
    kind = _type(value)
    if kind is not None or not isinstance(value, dict):
        return str(kind)
    return "item_reference" if "role" not in value and "id" in value else "message"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message=f"the items that there are here are {', '.join(_ITEMS)}",
    ),
]


class Items(Strict):
    input: list[AnyItem]


_ITEMS_AS_JSON = TypeAdapter(list[AnyItem])


class OfferedFunction(Strict):
    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = Field(default=None, description="Ignored, as are the next ones.")
    allowed_callers: Any = None
    defer_loading: Any = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """The tools that an answer may call, of those that are offered."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


def _choice_shape(value: Any) -> str:
    if isinstance(value, str):
        return "word"
    return "allowed" if _type(value) == "allowed_tools" else "named"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunction, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(_choice_shape),
]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Ignored.")


class ReasoningConfig(Strict):
    """Whether a model that can be told so thinks aloud; how much it thinks is its own affair."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="none: it does not think; others: it does."
    )
    summary: Any = Field(default=None, description="Ignored: thoughts are told whole.")
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class InputBody(Strict):
    """Counts the tokens of what a response would be asked for."""

    model: str = Field(min_length=1, description="A deployment's name.")
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[AnyItem], Tag("parts")],
        Discriminator(_content_shape),
    ]
    instructions: str | None = None
    previous_response_id: str | None = Field(
        default=None, description="Its items, and its answer's, come before those of the input."
    )
    tools: Annotated[list[OfferedFunction], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Any = None
    conversation: Any = None


class ResponsesBody(InputBody):
    """Answers a conversation of items, which it may keep for an hour."""

    stream: bool | None = None
    stream_options: StreamOptions | None = Field(default=None, description="Ignored.")
    store: bool | None = Field(default=None, description="Keep the answer, unless false.")
    max_output_tokens: int | None = Field(
        default=None, description="Absent: what the context leaves; never more than that."
    )
    temperature: float | None = None
    top_p: float | None = None
    include: list[str] | None = Field(
        default=None, description=f"{LOGPROBS}; what is not there is left out."
    )
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="With that.")
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    background: bool | None = Field(
        default=None, description="Answer at once; the response is made all the same."
    )
    prompt: None = None
    moderation: Any = None
    max_tool_calls: Any = Field(default=None, description="Ignored: of tools of the service.")
    context_management: Any = Field(default=None, description="Ignored, as are the next ones.")
    user: Any = None
    safety_identifier: Any = None
    service_tier: str | None = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    client_metadata: Any = None


class Responses:
    """Reads calls, with what they continue."""

    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept
        self._runs = Runs()

    def read(self, raw: bytes, id_: str = "") -> tuple[ChatBody, NewWriter | Background]:
        """`id_` is that of a response which is being made in the background. Raises
        InvalidInput.
        """
        body = read(ResponsesBody, raw)
        own = _own_items(body)
        further = {
            **copied(body, "responses"),
            "stream": body.stream or bool(id_),
            "logprobs": LOGPROBS in (body.include or ()),
        }
        chat = self.chat_of(body, own, further)
        keep = None
        if body.store is not False:
            keep = partial(self._keep, said=own, previous=body.previous_response_id)
        repeated = _repeated(body)
        if not body.background:
            return chat, lambda to: ResponseWriter(to, repeated, keep)
        if keep is None:
            raise InvalidInput(
                "store: a response that is made in the background is kept",
                hint="leave it out",
                field="store",
            )
        if id_:
            return chat, lambda to: ResponseWriter(replace(to, id_=id_), repeated, keep)
        id_ = secrets.token_hex(12)
        queued = response(
            id=f"resp_{id_}",
            created_at=int(time.time()),
            status="queued",
            model=body.model,
            output=[],
            temperature=body.temperature,
            top_p=body.top_p,
            **repeated,
        )
        # The items take about as much as they do in the body.
        run = Run(response_queued=queued, keep=keep, given_bytes=2 * len(raw))
        read_again = partial(self.read, id_=id_)
        return chat, Background(
            id_=queued["id"], run=run, runs=self._runs, stream=bool(body.stream), read=read_again
        )

    def _keep(
        self, answer: Mapping[str, Any], *, said: Sequence[AnyItem], previous: str | None
    ) -> None:
        items = _ITEMS_AS_JSON.dump_json(list(said), exclude_none=True)
        self._kept.keep(answer, said=items, previous=previous)

    def chat_of(
        self, body: InputBody, own: Sequence[AnyItem], further: Mapping[str, Any]
    ) -> ChatBody:
        """The same in the words of Chat Completions, with `further` members; `own` are the items of
        its input. Raises InvalidInput.
        """
        check_built(body)
        items = [*self._earlier(body), *own]
        references = sum(isinstance(item, ReferenceItem) for item in items)
        if references > REFERENCES_MAX:
            raise InvalidInput(
                f"input has {references} item references; {REFERENCES_MAX} is the limit",
                hint="send the items themselves",
                field="input",
            )
        said = _messages([self._referred(item) for item in items])
        instructions = [] if body.instructions is None else [message("system", body.instructions)]
        tools, choice = _tools(body)
        effort = body.reasoning and body.reasoning.effort
        return chat_body(
            {
                "model": body.model,
                "messages": [*instructions, *said],
                "chat_template_kwargs": {"enable_thinking": effort != "none"} if effort else None,
                "tools": tools or None,
                "tool_choice": choice,
                "parallel_tool_calls": body.parallel_tool_calls,
                "response_format": _format(body.text),
                **further,
            }
        )

    def _earlier(self, body: InputBody) -> Sequence[AnyItem]:
        """Raises InvalidInput."""
        if body.previous_response_id is None:
            return ()
        given = {"input": self._kept.conversation(body.previous_response_id)}
        check_containers(given)
        return validated(Items, given).input

    def _referred(self, item: AnyItem) -> AnyItem:
        """Raises InvalidInput."""
        if not isinstance(item, ReferenceItem):
            return item
        return validated(Items, {"input": [self._kept.item(item.id)]}).input[0]

    async def one(self, request: Request) -> Response:
        """GET of an answer that is kept or being made, DELETE of it."""
        id_ = request.path_params["id"]
        run, found = self._runs.get(id_), self._kept.get(id_)
        if request.query_params.get("stream") == "true" and request.method == "GET":
            if run is None:
                was = found is not None and from_json(found)["background"]
                raise InvalidInput(
                    "stream: the events of this response are not kept any more"
                    if was
                    else "stream: the response was not made in the background; its events are not "
                    "kept",
                    hint="leave it out",
                    field="stream",
                )
            return StreamingResponse(run.since(_starting_after(request)), media_type=EVENT_STREAM)
        if found is None and run is not None and not run.ended:
            found = encoded(run.response)
        if found is None:
            raise HTTPException(404)
        if request.method == "DELETE":
            self._runs.forget(id_)
            self._kept.delete(id_)
            found = DeletedResponse(id=id_).model_dump_json().encode()
        return Response(found, media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """POST; an answer that was not made in the background cannot be cancelled."""
        id_ = request.path_params["id"]
        run = self._runs.get(id_)
        if run is not None:
            cancel(run)
        found = self._kept.get(id_)
        if found is None:
            raise HTTPException(404)
        if run is not None or from_json(found)["background"]:
            return Response(found, media_type="application/json")
        raise InvalidInput(
            "Cannot cancel a synchronous response.", hint="close its connection: that frees it"
        )


def _starting_after(request: Request) -> int:
    """The number of the last event that its client has. Raises InvalidInput."""
    given = request.query_params.get("starting_after", "-1")
    if re.fullmatch(r"-1|[0-9]{1,9}", given) is None:
        raise InvalidInput(
            f"starting_after is {given[:20]!r}; it must be an event's sequence_number",
            field="starting_after",
        )
    return int(given)


class CountInput(Answered[InputBody]):
    kind = InputBody

    def __init__(self, gateway: Gateway, responses: Responses, bodies: Bodies) -> None:
        super().__init__(gateway, bodies)
        self._responses = responses

    async def answered(self, body: InputBody, exchange: Exchange) -> InputTokens:
        chat = self._responses.chat_of(body, _own_items(body), {})
        return InputTokens(input_tokens=await self.count(chat))


def _own_items(body: InputBody) -> Sequence[AnyItem]:
    if isinstance(body.input, str):
        return [MessageItem.model_construct(role="user", content=body.input)]
    return body.input


def _messages(items: Sequence[AnyItem]) -> Iterator[Message]:
    """What an assistant thought, said and called in a row is one message."""
    for is_assistant, together in groupby(items, key=_is_assistant):
        if is_assistant:
            yield _assistant(list(together))
            continue
        for item in together:
            match item:
                case CallOutputItem():
                    yield message("tool", _text(item.output), tool_call_id=item.call_id)
                case MessageItem():
                    yield message(item.role, _text(item.content))


def _is_assistant(item: AnyItem) -> bool:
    return isinstance(item, (ReasoningItem, CallItem)) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def _assistant(items: Sequence[AnyItem]) -> Message:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for item in items:
        match item:
            case MessageItem():
                texts.append(_text(item.content))
            case ReasoningItem():
                thoughts += [part.text for part in item.content or item.summary or ()]
            case CallItem():
                calls.append(tool_call(item.call_id, item.name, item.arguments))
    return assistant_message(texts, thoughts, calls)


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    parts = (part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
    return "".join(parts)


def _tools(body: InputBody) -> tuple[list[Tool], ToolChoice | None]:
    """Those that an answer may call. Raises InvalidInput."""
    tools, choice = list(body.tools or ()), body.tool_choice
    given: ToolChoice | None = None
    match choice:
        case AllowedTools():
            allowed = [tool.name for tool in choice.tools]
            missing = set(allowed) - {tool.name for tool in tools}
            if missing:
                raise InvalidInput(
                    f"tool_choice allows {min(missing)!r}, which is none of the tools",
                    field="tool_choice",
                )
            tools, given = [tool for tool in tools if tool.name in allowed], choice.mode
        case NamedFunction():
            given = named_tool(choice.name)
        case _:
            given = choice
    offered = [
        function_tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in tools
    ]
    return offered, given


def _format(text: TextConfig | None) -> ResponseFormat | None:
    """Raises InvalidInput."""
    if text is None or text.format is None:
        return None
    form = text.format
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise InvalidInput("text.format lacks schema", field="text.format.schema")
    return json_format(form.schema_, strict=form.strict)


def _repeated(body: ResponsesBody) -> dict[str, Any]:
    """What an answer repeats of its call."""
    reasoning, choice = body.reasoning, body.tool_choice
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "text": {"format": {"type": "text"}, **(_said(body.text) if body.text else {})},
        "tool_choice": _said(choice) if isinstance(choice, Strict) else choice or "auto",
        "tools": [_said(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
    }


def _said(member: Strict) -> dict[str, Any]:
    return member.model_dump(by_alias=True, exclude_none=True)
