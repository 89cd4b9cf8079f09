"""What clients of OpenAI's Responses are answered: its schemas, and the events of its streams.

A stream tells the response as it begins, each of its items in turn (added, its part, deltas, done),
then the response as it ended; each event has a number. Before: `generation`, which has the events
of the gateway. After: `kept_responses`, where the answer is kept.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from mesh.domain.invocation import Finished
from mesh.domain.reasons import FinishReason
from mesh.http.answers import AnswerTo, call_id
from mesh.http.blocks import Block, BlockWriter
from mesh.http.logprobs import TokenLogprob
from mesh.http.refusals import Failure, encoded

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ThoughtText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputItem(BaseModel):
    id: str
    status: Status = "in_progress"


class OutputMessage(OutputItem):
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class OutputReasoning(OutputItem):
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []
    content: list[ThoughtText] = []


class OutputCall(OutputItem):
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""


AnyOutput = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[AnyOutput]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str | None = None
    """The SLO class; null, where its deployment has none."""
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel):
    """An event of a stream; `type` says which members it has beside."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def _usual(kind: type[BaseModel]) -> dict[str, Any]:
    """The members that have a default. Pydantic would take as long as all else that is done before
    a first token.
    """
    members = kind.model_fields.items()
    return {name: member.default for name, member in members if not member.is_required()}


_RESPONSE = _usual(ResponseAnswer)
_ITEMS = {
    "thought": _usual(OutputReasoning),
    "text": _usual(OutputMessage),
    "call": _usual(OutputCall),
}
_PARTS = {"thought": _usual(ThoughtText), "text": _usual(OutputText)}
Keep = Callable[[Mapping[str, Any]], None]
_IDS = {"thought": "rs", "text": "msg", "call": "fc"}
_TEXTS = {"thought": "reasoning_text", "text": "output_text"}


class ResponseWriter(BlockWriter):
    """`told` is what an answer repeats of its call; `keep` is given the answer when it has ended,
    unless nobody wants it.
    """

    def __init__(self, to: AnswerTo, told: Mapping[str, Any], keep: Keep | None) -> None:
        super().__init__(to)
        self._told = told
        self._keep = keep
        self._created_s = int(time.time())
        self._events = 0
        self._output: list[dict[str, Any]] = []
        """The items of the blocks, as they were told last."""

    def opening(self, index: int) -> bytes:
        begun = encoded(self._response("in_progress"))
        kinds = (b"response.created", b"response.in_progress")
        self._events += len(kinds)
        return b"".join(
            b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n'
            % (kind, kind, number, begun)
            for number, kind in enumerate(kinds)
        )

    def failing(self, failure: Failure, body: bytes) -> bytes:
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        fault = ResponseFault(code=code, message=failure.error.message)
        answer = self._response("failed", error=fault.model_dump())
        if self._keep is not None:
            self._keep(answer)
        return self._event("response.failed", response=answer)

    def _begun(self, block: Block) -> bytes:
        id_ = f"{_IDS[block.kind]}_{self._to.id_}_{block.number}"
        item = {"id": id_, **_ITEMS[block.kind]}
        if block.kind == "call":
            item |= {"call_id": call_id(), "name": block.name}
        self._output.append(item)
        told = self._of_item("response.output_item.added", block, item=item)
        if block.kind == "call":
            return told
        return told + self._of_part("response.content_part.added", block, part=_PARTS[block.kind])

    def _grown(self, block: Block, more: str, logprobs: list[TokenLogprob]) -> bytes:
        if block.kind == "call":
            kind = "response.function_call_arguments.delta"
            return self._of_item(kind, block, item_id=self._output[-1]["id"], delta=more)
        further = {"logprobs": _dumped(logprobs)} if block.kind == "text" else {}
        kind = f"response.{_TEXTS[block.kind]}.delta"
        return self._of_part(kind, block, delta=more, **further)

    def _closed(self, block: Block, end: Finished | None) -> bytes:
        item = self._output[-1]
        item["status"] = "incomplete" if _is_cut(end) else "completed"
        if block.kind == "call":
            item["arguments"] = block.text
            kind = "response.function_call_arguments.done"
            told = self._of_item(kind, block, item_id=item["id"], arguments=block.text)
        else:
            further = {"logprobs": _dumped(block.logprobs)} if block.kind == "text" else {}
            part = {**_PARTS[block.kind], "text": block.text, **further}
            item["content"] = [part]
            kind = f"response.{_TEXTS[block.kind]}.done"
            told = self._of_part(kind, block, text=block.text, **further)
            told += self._of_part("response.content_part.done", block, part=part)
        return told + self._of_item("response.output_item.done", block, item=item)

    def _ended(self, end: Finished) -> bytes:
        answer = self._answer(end)
        return self._event(f"response.{answer['status']}", response=answer)

    def _answer(self, end: Finished) -> dict[str, Any]:
        cut = _is_cut(end)
        usage = ResponseUsage(
            input_tokens=end.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=end.cached_prompt_tokens),
            output_tokens=end.output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._thought_tokens or 0),
            total_tokens=end.prompt_tokens + end.output_tokens,
        )
        answer = self._response(
            "incomplete" if cut else "completed",
            usage=usage.model_dump(),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
        )
        if self._keep is not None:
            self._keep(answer)
        return answer

    def _response(self, status: Status, **further: Any) -> dict[str, Any]:
        return response(
            id=f"resp_{self._to.id_}",
            created_at=self._created_s,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            model=self._to.asked.deployment,
            output=self._output,
            service_tier=self._to.slo_class or None,
            temperature=self._to.asked.temperature,
            top_p=self._to.asked.top_p,
            **self._told,
            **further,
        )

    def _of_part(self, kind: str, block: Block, **members: Any) -> bytes:
        id_ = self._output[-1]["id"]
        return self._of_item(kind, block, item_id=id_, content_index=0, **members)

    def _of_item(self, kind: str, block: Block, **members: Any) -> bytes:
        return self._event(kind, output_index=block.number, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._events, **members}
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded(told))


def response(**members: Any) -> dict[str, Any]:
    """A `ResponseAnswer`, as JSON has it, of what is not as usual."""
    return {**_RESPONSE, **members}


def _is_cut(end: Finished | None) -> bool:
    return end is not None and end.reason is FinishReason.LENGTH


def _dumped(logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    return [one.model_dump() for one in logprobs]
