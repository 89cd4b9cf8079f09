"""Ollama's API: its calls read as those of OpenAI's protocol, its answers, and what it lists.

A stream is a JSON object a line. Before: `generation`, which has the bytes and the events of the
gateway, and the routes. After: `asking`, as for a chat. What works models is refused: `mesh deploy`
does.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

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
from mesh.http.bodies import Body, Message, chat_body, completion_body, json_format, message, read
from mesh.http.exchange import Apart, Exchange
from mesh.http.generation import NewWriter, OfAnyTask
from mesh.http.logprobs import TokenLogprob
from mesh.http.members import copied
from mesh.http.refusals import Failure, encoded, json_response
from mesh.http.tokens import Answered
from mesh.http.tools import Strict, Tools, tool_call
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


class OllamaBody(Strict):
    model: str = Field(min_length=1, description="A deployment's name.")
    stream: bool | None = Field(default=None, description="A line a piece, unless false.")
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        default=None, description="json, or a schema."
    )
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
    """Answers, or continues as it is, one prompt of Ollama's protocol; loads the model without."""

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
    asked = {**_common(body), "tools": body.tools}
    asked["messages"] = [_message(n, said) for n, said in enumerate(body.messages)]
    return chat_body(asked), OllamaWriter


def read_generate(raw: bytes) -> tuple[Body, NewWriter | Apart]:
    """Raises InvalidInput."""
    body = read(GenerateBody, raw)
    check_built(body)
    if not (body.prompt or body.suffix):
        return _without_prompt(body, {"response": ""})
    asked = _common(body)
    if body.raw or body.suffix:
        asked["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
        asked |= {"prompt": body.prompt or "", "suffix": body.suffix}
        return completion_body(asked), GenerateWriter
    said = (("system", body.system), ("user", body.prompt))
    asked["messages"] = [message(*one) for one in said if one[1]]
    return chat_body(asked), GenerateWriter


def _without_prompt(body: OllamaBody, said: dict[str, Any]) -> tuple[Body, NewWriter | Apart]:
    """A call that has the model loaded, by a token that nobody is told; with `keep_alive: 0`, one
    that is told that the model goes: when it does, its deployment decides.
    """
    model = body.model.removesuffix(TAG)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    asked = completion_body({"model": model, "prompt": [0], "max_tokens": 1})
    told = {"model": model, "created_at": _now(), **said, "done": True, "done_reason": reason}
    if reason == "unload":
        return asked, Unload(encoded(told))
    return asked, OfAnyTask(LoadWriter, told=encoded(told))


def _common(body: OllamaBody) -> dict[str, Any]:
    """What both calls have, in the words of OpenAI's chats."""
    thinks = None if body.think is None else {"enable_thinking": body.think is not False}
    asked, form = copied(body, "ollama"), body.format
    schema = form if isinstance(form, dict) else None
    return {
        **asked,
        "model": body.model.removesuffix(TAG),
        "stream": body.stream is not False,
        "max_tokens": asked["max_tokens"] if (asked["max_tokens"] or 0) > 0 else None,
        "response_format": None if form in (None, "") else json_format(schema),
        "chat_template_kwargs": thinks,
        "logprobs": body.logprobs,
    }


def _message(number: int, said: OllamaMessage) -> Message:
    calls = [
        tool_call(call.id or f"call_{number}_{n}", of.name, json.dumps(of.arguments))
        for n, call in enumerate(said.tool_calls or ())
        for of in [call.function]
    ]
    return message(
        said.role,
        said.content,
        reasoning_content=said.thinking,
        tool_calls=calls or None,
        tool_call_id=said.tool_call_id,
        name=said.tool_name or said.name,
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

    def failing(self, failure: Failure, body: bytes) -> bytes:
        return body + b"\n"

    def _grown(self, block: Block, more: str, logprobs: list[TokenLogprob]) -> bytes:
        part = Block(kind=block.kind, number=0, text=more, logprobs=logprobs)
        return b"" if block.kind == "call" else self._line(part)

    def _closed(self, block: Block, end: Finished | None) -> bytes:
        return self._line(block) if block.kind == "call" else b""

    def _ended(self, end: Finished) -> bytes:
        return self._line(end=end)

    def _answer(self, end: Finished) -> dict[str, Any]:
        return self._told(self._blocks, end)

    def _line(self, *blocks: Block, end: Finished | None = None) -> bytes:
        return encoded(self._told(blocks, end)) + b"\n"

    def _told(self, blocks: Sequence[Block], end: Finished | None) -> dict[str, Any]:
        told = {"model": self._to.asked.deployment, "created_at": _now(), **self._said(blocks)}
        logprobs = [one.model_dump() for block in blocks for one in block.logprobs]
        told |= {"logprobs": logprobs} if logprobs else {}
        if end is None:
            return told | {"done": False}
        ttft_ns = int(end.ttft_s * _NS)
        answer_ns = int((end.output_tokens - 1) * end.tpot_s * _NS)
        return told | {
            "done": True,
            "done_reason": end.reason.value,
            "total_duration": ttft_ns + answer_ns,
            "load_duration": int(end.grace_s * _NS),
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": ttft_ns,
            "eval_count": end.output_tokens,
            "eval_duration": answer_ns,
        }

    def _said(self, blocks: Sequence[Block]) -> dict[str, Any]:
        calls = [
            {"function": {"name": block.name, "arguments": begun_object(block.text)}}
            for block in blocks
            if block.kind == "call"
        ]
        told = {"role": "assistant", **_texts("content", blocks)}
        return {"message": {**told, "tool_calls": calls} if calls else told}


class GenerateWriter(OllamaWriter):
    """Answers to one prompt."""

    def _said(self, blocks: Sequence[Block]) -> dict[str, Any]:
        return _texts("response", blocks)


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


def _texts(member: str, blocks: Sequence[Block]) -> dict[str, Any]:
    """The words, as this member, and the thoughts, if there are any."""
    said = {kind: "".join(b.text for b in blocks if b.kind == kind) for kind in ("text", "thought")}
    return {member: said["text"], **({"thinking": said["thought"]} if said["thought"] else {})}


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
        return json_response({"models": [card for _, card in self._cards()]})

    async def ps(self, request: Request) -> Response:
        """Those that are loaded."""
        loaded = []
        for deployment, card in self._cards():
            if held := [one for one in deployment.instances if one.state in _HELD]:
                card["size_vram"] = sum(one.weights_bytes for one in held)
                card["context_length"] = deployment.context_tokens_max
                loaded.append(card)
        return json_response({"models": loaded})

    def _cards(self) -> Iterator[tuple[DeploymentSnapshot, dict[str, Any]]]:
        for one in self._snapshot().deployments:
            if one.model is not None:
                yield (
                    one,
                    {
                        "name": one.spec.name,
                        "model": one.spec.name,
                        "modified_at": self._started,
                        "size": one.model.disk_bytes,
                        "digest": one.model.model_id.removeprefix("sha256-"),
                        "details": _details(one.model),
                    },
                )


async def refuse(request: Request) -> Response:
    """Raises InvalidInput: models are deployed, and not pulled."""
    raise InvalidInput(
        f"{request.url.path} is not supported here",
        hint="`mesh deploy`, `mesh get` and `mesh delete` work models; /api/embed embeds",
    )
