"""What clients of OpenAI's protocol send: schemas of the two calls, and bytes read as one of them.

The schemas say what is understood; what a deployment can be asked is checked where every protocol
comes together, in the gateway. Before: `generation`, which has read the bytes. After: `asking`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError
from pydantic_core import ErrorDetails, from_json

from mesh.domain.checks import CACHE_SALT_CHARS_MAX
from mesh.domain.errors import InvalidInput
from mesh.http.tools import CacheControl, Strict, ToolCall, ToolChoice, Tools

T = TypeVar("T", bound=Strict)
_SHOWN_CHARS = 100
CONTAINERS_MAX = 16_384
"""Lists and objects of a body. Each takes some 25 µs of the controller's loop to be checked; a
conversation of a thousand turns with calls of tools has some 6,000.
"""


def prompt_shape(value: Any) -> str:
    """The shape of a prompt, content or stop: text, texts, tokens or token_lists."""
    if not isinstance(value, list):
        return "text"
    if value and isinstance(value[0], list):
        return "token_lists"
    return "tokens" if value and isinstance(value[0], int) else "texts"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[int], Tag("tokens")]
    | Annotated[list[list[int]], Tag("token_lists")],
    Discriminator(prompt_shape),
]
"""Text or tokens, or several of either."""


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    annotations: Any = None


class RefusalPart(Strict):
    """A part of an assistant's message: what it said in place of an answer."""

    type: Literal["refusal"]
    refusal: str
    cache_control: CacheControl = None


def _part(value: Any) -> str:
    is_refusal = isinstance(value, dict) and value.get("type") == "refusal"
    return "refusal_part" if is_refusal else "text_part"


Part = Annotated[
    Annotated[TextPart, Tag("text_part")] | Annotated[RefusalPart, Tag("refusal_part")],
    Discriminator(_part),
]


class Message(Strict):
    """`developer` is `system` by another name. Clients send assistants' messages back as they came:
    members that only describe what was said are ignored.
    """

    role: str = Field(min_length=1)
    content: Annotated[
        Annotated[str | None, Tag("text")] | Annotated[list[Part], Tag("texts")],
        Discriminator(lambda value: "texts" if isinstance(value, list) else "text"),
    ] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="The same by another name.")
    annotations: Any = Field(default=None, description="Ignored, as are the next ones.")
    cache_control: CacheControl = None
    citations: Any = None
    id: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    parsed: Any = Field(default=None, description="Ignored: the content, read by a client.")
    provider_specific_fields: Any = None
    refusal: str | None = Field(default=None, description="Said in place of the content.")
    function_call: None = None
    audio: None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="Each chunk says how many tokens its answer has; vLLM's name."
    )
    include_obfuscation: bool | None = Field(default=None, description="Ignored: there is none.")


class JsonSchema(Strict):
    """What OpenAI's protocol calls a format by a schema, which is kept to."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(
        default=None, description="What cannot be kept to is refused; else it is left out."
    )


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's words for the same, one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="In Lark's notation.")


Stops = Annotated[
    Annotated[str | None, Tag("text")] | Annotated[list[str], Tag("texts")],
    Discriminator(lambda value: "texts" if isinstance(value, list) else "text"),
]


class Body(Strict):
    """What both calls take."""

    model: str = Field(min_length=1, description="A deployment's name.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(
        default=None, description="Absent: what the context leaves; never more than that."
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 or -1: no limit.")
    seed: int | None = None
    stop: Stops = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Added to the logits of tokens, by their ids: -100 to 100."
    )
    n: int | None = Field(
        default=None, description="So many answers: up to 128; the prompt is computed once."
    )
    user: str | None = Field(default=None, description="Ignored, as metadata, store and the like.")
    metadata: Any = None
    store: Any = None
    service_tier: str | None = Field(
        default=None, description="One of the deployment's SLO classes; auto: the default one."
    )
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    prompt_logprobs: int | None = Field(
        default=None, description="Of each token of the prompt; its cache is left out then."
    )
    min_tokens: int | None = Field(
        default=None, description="No stop ends the answer before it has so many."
    )
    stop_token_ids: list[int] | None = Field(
        default=None, description="They end the answer as the model's own do."
    )
    bad_words: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    priority: Any = None
    include_reasoning: Any = None
    return_tokens_as_token_ids: Any = None
    return_token_ids: Any = None
    request_id: Any = Field(default=None, description="Ignored: each call is given its own.")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = Field(
        default=None,
        max_length=CACHE_SALT_CHARS_MAX,
        description="Only requests with the same one share the cache of what was computed.",
    )


class CompletionBody(Body):
    """Continues text or tokens, without the chat template; up to 16 of either in one call."""

    prompt: Prompts
    logprobs: int | None = Field(
        default=None,
        description="Of each token, and of so many likeliest; 0 to 20.",
    )
    best_of: int | None = Field(
        default=None, description="So many answers, of which the n likeliest are told; no stream."
    )
    echo: bool | None = Field(
        default=None, description="The prompt comes before its answer; max_tokens may then be 0."
    )
    suffix: str | None = Field(
        default=None,
        description="What the answer comes before, where the model has tokens for filling in.",
    )


class ChatBody(Body):
    """Answers a conversation, rendered by the model's chat template."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(default=None, description="Goes before max_tokens.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description="Names that the model's chat template knows, such as its switch "
        "for thinking aloud.",
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="So many likeliest tokens; with logprobs."
    )
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether a required answer may make several calls; else it may."
    )
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    documents: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    echo: Literal[False] | None = None


def read(kind: type[T], raw: bytes) -> T:
    """Raises InvalidInput, with the first member that is wrong, for bytes that are no such body."""
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidInput(f"the body is no valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidInput("the body is no JSON object")
    check_containers(data)
    return validated(kind, data)


def check_containers(data: Any) -> None:
    """Raises InvalidInput for a body with too many lists and objects."""
    if _containers_beyond(data, CONTAINERS_MAX):
        raise InvalidInput(
            f"the body has more than {CONTAINERS_MAX} lists and objects",
            hint="send fewer or shorter messages, tools or schemas",
        )


def validated(kind: type[T], data: dict[str, Any]) -> T:
    """Raises InvalidInput."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False)[0], data) from None


_EMPTY_CHAT, _EMPTY_COMPLETION = ChatBody.model_construct(), CompletionBody.model_construct()
_EMPTY_MESSAGE = Message.model_construct()


def _like(empty: T, members: Mapping[str, Any]) -> T:
    """With these members, and the defaults of others. Before a first token pydantic would take 0.1
    ms to fill these in, and 0.03 to copy them.
    """
    made = object.__new__(type(empty))
    object.__setattr__(made, "__dict__", {**vars(empty), **members})
    object.__setattr__(made, "__pydantic_fields_set__", set(members))
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


def chat_body(members: Mapping[str, Any]) -> ChatBody:
    """One that was checked in another protocol's words."""
    return _like(_EMPTY_CHAT, members)


def completion_body(members: Mapping[str, Any]) -> CompletionBody:
    return _like(_EMPTY_COMPLETION, members)


def message(role: str, content: str | None, **further: Any) -> Message:
    return _like(_EMPTY_MESSAGE, {"role": role, "content": content, **further})


def assistant_message(
    texts: Sequence[str], thoughts: Sequence[str], calls: list[ToolCall]
) -> Message:
    """What an assistant has said in parts, as one message."""
    return message(
        "assistant",
        "\n".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def json_format(schema: dict[str, Any] | None, *, strict: bool | None = None) -> ResponseFormat:
    """JSON by a schema, or any object."""
    if schema is None:
        return ResponseFormat(type="json_object")
    kept_to = JsonSchema.model_construct(schema_=schema, strict=strict)
    return ResponseFormat.model_construct(type="json_schema", json_schema=kept_to)


def _containers_beyond(data: Any, most: int) -> bool:
    """Whether there are more lists and objects in it, itself included."""
    left = [data]
    seen = 1
    while left:
        value = left.pop()
        inner = [
            one
            for one in (value.values() if isinstance(value, dict) else value)
            if isinstance(one, (dict, list))
        ]
        seen += len(inner)
        if seen > most:
            return True
        left += inner
    return False


def _invalid(wrong: ErrorDetails, data: Any) -> InvalidInput:
    field = _path(wrong["loc"], data)
    if wrong["type"] == "extra_forbidden":
        return InvalidInput(f"unknown member {field}", field=field)
    if wrong["type"] == "missing":
        return InvalidInput(f"the body lacks {field}", field=field)
    said = wrong["msg"]
    if wrong["type"] == "literal_error" and isinstance(wrong["input"], str):
        said += f", not {wrong['input'][:_SHOWN_CHARS]!r}"
    return InvalidInput(f"{field}: {said[:1].lower()}{said[1:]}", field=field)


def _path(steps: Sequence[int | str], data: Any) -> str:
    """`messages[0].content`. Steps that name a shape, and nothing in the data, are left out."""
    path = ""
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if (
            not last
            and isinstance(data, dict)
            and data.get("type") == step
            and steps[number + 1] in data
        ):
            continue  # Anthropic's blocks have a member by the name of their type.
        if isinstance(step, int) and isinstance(data, list):
            path, data = f"{path}[{step}]", data[step] if step < len(data) else None
        elif isinstance(data, dict) and (step in data or last):
            path, data = f"{path}.{step}" if path else str(step), data.get(step)
    return path
