"""What clients of Anthropic's Messages are answered: its schemas, and the events of its streams.

A stream is one message: its start, a ping, each of its blocks in turn (start, deltas, stop), then
how it ended. Before: `generation`, which has the events of the gateway.
"""

from typing import Any, Literal

from pydantic import BaseModel

from mesh.domain.invocation import Finished, Tokens
from mesh.domain.reasons import FinishReason
from mesh.http.answers import AnswerTo, call_id
from mesh.http.blocks import Block, BlockWriter
from mesh.http.logprobs import TokenLogprob
from mesh.http.refusals import encoded
from mesh.text.tool_calls import begun_object

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextAnswer(BaseModel):
    type: Literal["text"] = "text"
    text: str = ""


class ThinkingAnswer(BaseModel):
    """`signature` names the message. Clients send thoughts back with one alone."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str


class ToolUseAnswer(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content = TextAnswer | ThinkingAnswer | ToolUseAnswer


class ThinkingDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """`input_tokens` are those that were not cached; the prompt has both."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails | None = None
    """`None` where the model does not think aloud."""


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    """`None` at the start of a stream."""
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of a stream; `type` says which members it has beside."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


class MessageError(BaseModel):
    type: str
    message: str


class MessageErrorBody(BaseModel):
    type: Literal["error"]
    error: MessageError
    request_id: str | None


class MessageWriter(BlockWriter):
    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._id = f"msg-{to.id_}"
        self._token_ids: list[int] = []
        """Those of the answer, where it may end at a stop sequence."""

    def opening(self, index: int) -> bytes:
        usage = self._usage(self._prompt_tokens.get(index, 0), self._cached_tokens, 0)
        message = self._message([], None, None, usage)
        return _event("message_start", message=message) + _event("ping")

    def piece(self, index: int, tokens: Tokens) -> bytes:
        if self._to.asked.stop:
            self._token_ids += tokens.token_ids
        return super().piece(index, tokens)

    def _begun(self, block: Block) -> bytes:
        told: Content
        match block.kind:
            case "text":
                told = TextAnswer()
            case "thought":
                told = ThinkingAnswer(signature="")
            case "call":
                told = ToolUseAnswer(id=call_id("toolu"), name=block.name, input={})
        return _event("content_block_start", index=block.number, content_block=told.model_dump())

    def _grown(self, block: Block, more: str, logprobs: list[TokenLogprob]) -> bytes:
        match block.kind:
            case "text":
                return _delta(block, "text_delta", text=more)
            case "thought":
                return _delta(block, "thinking_delta", thinking=more)
            case "call":
                return _delta(block, "input_json_delta", partial_json=more)

    def _closed(self, block: Block, end: Finished | None) -> bytes:
        signed = block.kind == "thought"
        signature = _delta(block, "signature_delta", signature=self._id) if signed else b""
        return signature + _event("content_block_stop", index=block.number)

    def _ended(self, end: Finished) -> bytes:
        reason, stop = self._stopped(end)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = self._usage_at(end).model_dump(exclude_none=True)
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def _answer(self, end: Finished) -> dict[str, Any]:
        content = list(map(self._content, self._blocks))
        return self._message(content, *self._stopped(end), self._usage_at(end))

    def _content(self, block: Block) -> Content:
        match block.kind:
            case "text":
                return TextAnswer(text=block.text)
            case "thought":
                return ThinkingAnswer(thinking=block.text, signature=self._id)
            case "call":
                # What was cut is told as far as it came: members of a block are no text.
                given = begun_object(block.text)
                return ToolUseAnswer(id=call_id("toolu"), name=block.name, input=given)

    def _message(
        self,
        content: list[Content],
        reason: StopReason | None,
        stop: str | None,
        usage: MessageUsage,
    ) -> dict[str, Any]:
        """A `MessageAnswer`, as JSON has it."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._to.asked.deployment,
            "content": [block.model_dump() for block in content],
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage.model_dump(exclude_none=True),
        }

    def _usage_at(self, end: Finished) -> MessageUsage:
        usage = self._usage(end.prompt_tokens, end.cached_prompt_tokens, end.output_tokens)
        thought = self._thought_tokens
        if thought is not None:
            usage.output_tokens_details = ThinkingDetails(thinking_tokens=thought)
        return usage

    @staticmethod
    def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> MessageUsage:
        return MessageUsage(
            input_tokens=prompt_tokens - cached_tokens,
            cache_read_input_tokens=cached_tokens,
            output_tokens=output_tokens,
        )

    def _stopped(self, end: Finished) -> tuple[StopReason, str | None]:
        if end.reason is FinishReason.LENGTH:
            cut = end.output_tokens >= (self._to.asked.max_tokens or 0)
            return ("max_tokens" if cut else "model_context_window_exceeded"), None
        if stop := self._stop_sequence():
            return "stop_sequence", stop
        return ("tool_use" if self._reader.calls else "end_turn"), None

    def _stop_sequence(self) -> str | None:
        """The stop sequence that the answer ended at. The answer's text ends before it; its tokens
        spell it.
        """
        if self._to.bytes_of is None or not self._token_ids:
            return None
        said = b"".join(map(self._to.bytes_of, self._token_ids)).decode("utf-8", "replace")
        found = [
            (at + len(stop), stop) for stop in self._to.asked.stop if (at := said.find(stop)) >= 0
        ]
        return min(found)[1] if found else None


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded({"type": kind, **members}))


def _delta(block: Block, kind: str, **said: str) -> bytes:
    return _event("content_block_delta", index=block.number, delta={"type": kind, **said})
