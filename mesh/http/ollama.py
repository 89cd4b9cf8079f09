"""Ollama's API: its calls read as those of OpenAI's protocol, its answers, and what it lists.

A stream is a JSON object a line. Before: `generation`, which has the bytes and the events of the
gateway, and the routes. After: `asking`, as for a chat. What works models is refused: `mesh deploy`
does.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from mesh import __version__
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Finished, Tokens
from mesh.domain.lifecycle import InstanceState
from mesh.domain.model import ModelInfo
from mesh.domain.text import ToolFormat
from mesh.domain.views import CellSnapshot, DeploymentSnapshot
from mesh.http.answers import AnswerTo
from mesh.http.asking import check_built
from mesh.http.blocks import Block, BlockWriter
from mesh.http.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    JsonSchema,
    Message,
    ResponseFormat,
    read,
)
from mesh.http.exchange import Apart, Exchange
from mesh.http.generation import NewWriter, OfAnyTask
from mesh.http.logprobs import TokenLogprob
from mesh.http.members import copied
from mesh.http.refusals import Failure, encoded
from mesh.http.tokens import Answered
from mesh.http.tools import CalledFunction, Strict, ToolCall, Tools
from mesh.text.tool_calls import begun_object

TAG = ":latest"
"""Clients write it after names that have none."""

_NS = 1_000_000_000
_HELD = (InstanceState.READY, InstanceState.PARKED, InstanceState.DRAINING)


class Options(Strict):
    num_predict: int | None = Field(default=None, description="Below 1: what the context leaves.")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: Any = Field(default=None, description="Ignored, as are the next ones.")
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_thread: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    numa: Any = None
    draft_num_predict: Any = None
    repeat_last_n: Any = None
    penalize_newline: Any = None
    mirostat: Literal[0] | None = None
    tfs_z: Literal[1] | None = None
    typical_p: Literal[1] | None = None
    mirostat_tau: Any = Field(default=None, description="Ignored, as is the next one.")
    mirostat_eta: Any = None


def _format_shape(value: Any) -> str:
    return "schema" if isinstance(value, dict) else "word"


class OllamaBody(Strict):
    model: str = Field(min_length=1, description="A deployment's name.")
    stream: bool | None = Field(default=None, description="A line a piece, unless false.")
    options: Options | None = None
    format: (
        Annotated[
            Annotated[Literal["", "json"], Tag("word")] | Annotated[dict[str, Any], Tag("schema")],
            Discriminator(_format_shape),
        ]
        | None
    ) = Field(default=None, description="json, or a schema.")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        default=None, description="Whether a model thinks aloud that can be told so."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    keep_alive: Any = Field(default=None, description="Ignored: deployments say it.")
    truncate: Any = Field(default=None, description="Ignored: no prompt is ever cut.")
    shift: Any = Field(default=None, description="Ignored: an answer ends with its context.")


class OllamaFunction(Strict):
    name: str
    arguments: dict[str, Any]
    index: Any = None


class OllamaCall(Strict):
    function: OllamaFunction
    id: str | None = None
    type: Any = None


class OllamaMessage(Strict):
    role: str = Field(min_length=1)
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    name: str | None = Field(default=None, description="The same by an older name.")
    tool_call_id: str | None = None
    images: Annotated[list[str], Field(max_length=0)] | None = None


class OllamaChatBody(OllamaBody):
    """Answers a conversation of Ollama's protocol; one without messages loads the model."""

    messages: list[OllamaMessage] | None = None
    tools: Tools | None = None


class GenerateBody(OllamaBody):
    """Answers one prompt of Ollama's protocol; with `raw` it is continued as it is. Without one the
    model is loaded.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = Field(default=None, description="The prompt is then continued as it is.")
    template: Literal[""] | None = None
    context: Any = None
    images: Any = None


def read_ollama_chat(raw: bytes) -> tuple[Body, NewWriter | Apart]:
    """Raises InvalidInput."""
    body = read(OllamaChatBody, raw)
    if not body.messages:
        return _without_prompt(body, {"message": {"role": "assistant", "content": ""}})
    messages = [_message(n, message) for n, message in enumerate(body.messages)]
    return _chat(body, messages).model_copy(update={"tools": body.tools}), OllamaWriter


def read_generate(raw: bytes) -> tuple[Body, NewWriter | Apart]:
    """Raises InvalidInput."""
    body = read(GenerateBody, raw)
    check_built(body)
    if not (body.prompt or body.suffix):
        return _without_prompt(body, {"response": ""})
    if body.raw or body.suffix:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        asked = CompletionBody.model_construct(
            prompt=body.prompt or "", logprobs=logprobs, suffix=body.suffix
        )
        return asked.model_copy(update=_common(body)), GenerateWriter
    said = [("system", body.system)] if body.system else []
    said.append(("user", body.prompt or ""))
    messages = [Message.model_construct(role=role, content=text) for role, text in said]
    return _chat(body, messages), GenerateWriter


def _without_prompt(body: OllamaBody, said: dict[str, Any]) -> tuple[Body, NewWriter | Apart]:
    """A call that has the model loaded, by a token that nobody is told; with `keep_alive: 0`, one
    that is told that the model goes: when it does, its deployment decides.
    """
    model = body.model.removesuffix(TAG)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    asked = CompletionBody.model_construct(model=model, prompt=[0], max_tokens=1)
    told = {"model": model, "created_at": _now(), **said, "done": True, "done_reason": reason}
    if reason == "unload":
        return asked, Unload(encoded(told))
    return asked, OfAnyTask(LoadWriter, told=encoded(told))


def _chat(body: OllamaBody, messages: list[Message]) -> ChatBody:
    kwargs = None if body.think is None else {"enable_thinking": body.think is not False}
    chat = ChatBody.model_construct(messages=messages, chat_template_kwargs=kwargs)
    return chat.model_copy(update={"logprobs": body.logprobs, **_common(body)})


def _common(body: OllamaBody) -> dict[str, Any]:
    """What both calls have, in OpenAI's words."""
    asked, form = copied(body, "ollama"), None
    wanted = asked["max_tokens"]
    if isinstance(body.format, dict):
        schema = JsonSchema.model_construct(schema_=body.format)
        form = ResponseFormat.model_construct(type="json_schema", json_schema=schema)
    elif body.format:
        form = ResponseFormat.model_construct(type="json_object")
    return {
        **asked,
        "model": body.model.removesuffix(TAG),
        "stream": body.stream is not False,
        "max_tokens": None if wanted is None or wanted < 1 else wanted,
        "response_format": form,
    }


def _message(number: int, message: OllamaMessage) -> Message:
    calls = [
        ToolCall.model_construct(
            id=call.id or f"call_{number}_{n}",
            function=CalledFunction.model_construct(
                name=call.function.name, arguments=json.dumps(call.function.arguments)
            ),
        )
        for n, call in enumerate(message.tool_calls or ())
    ]
    return Message.model_construct(
        role=message.role,
        content=message.content,
        reasoning_content=message.thinking,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        name=message.tool_name or message.name,
    )


class OllamaAnswer(BaseModel):
    """A whole answer, or a line of one: with a `message`, or a `response`; numbers come last."""

    model: str
    created_at: str
    done: bool


class OllamaError(BaseModel):
    error: str


class OllamaWriter(BlockWriter):
    """Chats."""

    stream_type = "application/x-ndjson"

    def opening(self, index: int) -> bytes:
        return b""

    def failing(self, failure: Failure, body: bytes) -> bytes:
        return body + b"\n"

    def _begun(self, block: Block) -> bytes:
        return b""

    def _grown(self, block: Block, more: str, logprobs: list[TokenLogprob]) -> bytes:
        if block.kind == "call":
            return b""
        part = Block(kind=block.kind, number=0, text=more, logprobs=logprobs)
        return self._line([part])

    def _closed(self, block: Block, end: Finished | None) -> bytes:
        return self._line([block]) if block.kind == "call" else b""

    def _ended(self, end: Finished) -> bytes:
        return self._line([], end)

    def _answer(self, end: Finished) -> dict[str, Any]:
        return self._told(self._blocks, end)

    def _line(self, blocks: list[Block], end: Finished | None = None) -> bytes:
        return encoded(self._told(blocks, end)) + b"\n"

    def _told(self, blocks: list[Block], end: Finished | None) -> dict[str, Any]:
        told = {"model": self._to.asked.deployment, "created_at": _now(), **self._said(blocks)}
        told |= {"done": end is not None}
        return told if end is None else told | _numbers(end)

    def _said(self, blocks: list[Block]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _text_of(blocks, "text")}
        if thought := _text_of(blocks, "thought"):
            message["thinking"] = thought
        calls = [
            {"function": {"name": block.name, "arguments": begun_object(block.text)}}
            for block in blocks
            if block.kind == "call"
        ]
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **_logprobs_of(blocks)}


class GenerateWriter(OllamaWriter):
    """Answers to one prompt."""

    def _said(self, blocks: list[Block]) -> dict[str, Any]:
        told = {"response": _text_of(blocks, "text"), **_logprobs_of(blocks)}
        thought = _text_of(blocks, "thought")
        return {**told, "thinking": thought} if thought else told


class LoadWriter(OllamaWriter):
    """`told`, once the model could answer."""

    def __init__(self, to: AnswerTo, told: bytes) -> None:
        super().__init__(to)
        self._loaded = told

    def whole(self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]) -> bytes:
        return self._loaded


@dataclass(frozen=True, slots=True)
class Unload(Apart):
    """The answer of a call that nothing is computed for."""

    of_any_task: ClassVar[bool] = True

    told: bytes

    async def answer(
        self, exchange: Exchange, reads: Callable[[Any], ASGIApp], scope: Scope, raw: bytes
    ) -> None:
        await exchange.json(self.told)


def _numbers(end: Finished) -> dict[str, Any]:
    ttft_ns = int(end.ttft_s * _NS)
    answer_ns = int((end.output_tokens - 1) * end.tpot_s * _NS)
    return {
        "done_reason": end.reason.value,
        "total_duration": ttft_ns + answer_ns,
        "load_duration": int(end.grace_s * _NS),
        "prompt_eval_count": end.prompt_tokens,
        "prompt_eval_duration": ttft_ns,
        "eval_count": end.output_tokens,
        "eval_duration": answer_ns,
    }


def _text_of(blocks: list[Block], kind: str) -> str:
    return "".join(block.text for block in blocks if block.kind == kind)


def _logprobs_of(blocks: list[Block]) -> dict[str, Any]:
    told = [one.model_dump() for block in blocks for one in block.logprobs]
    return {"logprobs": told} if told else {}


def _now() -> str:
    return datetime.now(UTC).isoformat()


class ShowBody(Strict):
    model: str = Field(min_length=1, description="A deployment's name.")
    verbose: Any = None


class Shown(BaseModel):
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class Show(Answered[ShowBody]):
    """What is known of one model."""

    kind = ShowBody

    async def answered(self, body: ShowBody, exchange: Exchange) -> Shown:
        deployment = self._gateway.deployment(DeploymentName(body.model.removesuffix(TAG)))
        model = deployment.model
        words = ["completion" if deployment.spec.task is None else "embedding"]
        if await self._gateway.tool_format(deployment) is not ToolFormat.NONE:
            words.append("tools")
        if await self._gateway.thinking(deployment, "") is not None:
            words.append("thinking")
        return Shown(
            details=_details(model),
            model_info={
                "general.architecture": model.architecture,
                "general.parameter_count": model.parameters,
                f"{model.architecture}.context_length": deployment.context_tokens_max,
            },
            capabilities=words,
        )


def _details(model: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": model.format.value,
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": f"{model.parameters / 1e9:.1f}B",
        "quantization_level": model.quantisation,
    }


class Listed:
    """What there is: `snapshot` is the cell as the caller may see it."""

    def __init__(self, snapshot: Callable[[], CellSnapshot]) -> None:
        self._snapshot = snapshot
        self._started = _now()

    async def tags(self, request: Request) -> Response:
        """The deployments."""
        return _json({"models": [self._card(*one) for one in self._known()]})

    async def ps(self, request: Request) -> Response:
        """Those that are loaded."""
        loaded = [
            {
                **self._card(deployment, model),
                "size_vram": sum(one.weights_bytes for one in held),
                "context_length": deployment.context_tokens_max,
            }
            for deployment, model in self._known()
            if (held := [one for one in deployment.instances if one.state in _HELD])
        ]
        return _json({"models": loaded})

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    def _known(self) -> list[tuple[DeploymentSnapshot, ModelInfo]]:
        return [(one, one.model) for one in self._snapshot().deployments if one.model is not None]

    def _card(self, deployment: DeploymentSnapshot, model: ModelInfo) -> dict[str, Any]:
        return {
            "name": deployment.spec.name,
            "model": deployment.spec.name,
            "modified_at": self._started,
            "size": model.disk_bytes,
            "digest": model.model_id.removeprefix("sha256-"),
            "details": _details(model),
        }


async def refuse(request: Request) -> Response:
    """Raises InvalidInput: models are deployed, and not pulled."""
    raise InvalidInput(
        f"{request.url.path} is not supported here",
        hint="`mesh deploy`, `mesh get` and `mesh delete` work models; /api/embed embeds",
    )


def _json(told: dict[str, Any]) -> Response:
    return Response(encoded(told), media_type="application/json")
