"""What clients of Anthropic's Messages are answered: its schemas, and the events of its streams.

A stream is one message: its start, a ping, each of its blocks in turn (start, deltas, stop), then
how it ended. Before: `generation`, which has the events of the gateway.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal, assert_never

from pydantic import BaseModel

from mesh.domain.invocation import Accepted, Finished, Invocation, Tokens
from mesh.domain.reasons import FinishReason
from mesh.http.answers import ChatWriter, UsageTold
from mesh.http.logprobs import TokenBytes
from mesh.http.refusals import encoded
from mesh.text.answer_reader import NOTHING_ELSE, Reading, Said
from mesh.text.thoughts import Thought
from mesh.text.tool_calls import Arguments, CallBegun, Text, begun_object

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
    content: list[TextAnswer | ThinkingAnswer | ToolUseAnswer]
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


class MessageWriter(ChatWriter):
    """The one answer of a call of Messages."""

    ids, chunk, whole_object = "msg", "message", "message"
    tells_stops = True

    def __init__(
        self,
        id_: str,
        asked: Invocation,
        *,
        usage: UsageTold = UsageTold.LAST,
        bytes_of: TokenBytes | None = None,
        reading: Reading = NOTHING_ELSE,
    ) -> None:
        super().__init__(id_, asked, usage=usage, bytes_of=bytes_of, reading=reading)
        self._asked = asked
        self._id = f"{self.ids}-{id_}"
        self._cached_tokens = 0
        self._token_ids: list[int] = []
        """Those of the answer, where it may end at a stop sequence."""
        self._blocks = 0
        """Blocks that have begun."""
        self._block = ""
        """The type of the open one."""

    def accepted(self, index: int, accepted: Accepted) -> None:
        super().accepted(index, accepted)
        self._cached_tokens = accepted.cached_prompt_tokens

    def opening(self, index: int) -> bytes:
        prompt_tokens = self._prompt_tokens.get(index, 0)
        usage = self._usage(prompt_tokens, self._cached_tokens, 0)
        message = self._message([], None, None, usage)
        return _event("message_start", message=message) + _event("ping")

    def piece(self, index: int, tokens: Tokens) -> bytes:
        self._note(tokens)
        return b"".join(map(self._told_as, self._read(index, tokens)))

    def ending(self, index: int, end: Finished) -> bytes:
        left = self._readers[index].finish() if index in self._readers else []
        events = [*map(self._told_as, left), self._closed()]
        reason, stop = self._stopped(index, end)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = self._usage_at(end).model_dump(exclude_none=True)
        events += [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]
        return b"".join(events)

    def closing(self, ends: Sequence[Finished]) -> bytes:
        return b""

    def whole(self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]) -> bytes:
        (parts,), (end,) = answers, ends
        said = list[Said]()
        for part in parts:
            self._note(part)
            said += self._read(0, part)
        if 0 in self._readers:
            said += self._readers[0].finish()
        reason, stop = self._stopped(0, end)
        return encoded(self._message([*self._content(said)], reason, stop, self._usage_at(end)))

    def _content(
        self, said: Sequence[Said]
    ) -> Iterator[TextAnswer | ThinkingAnswer | ToolUseAnswer]:
        """The blocks, in their order."""
        block: TextAnswer | ThinkingAnswer | ToolUseAnswer | None = None
        arguments = ""
        for one in [*said, None]:
            match one, block:
                case Text(text=more), TextAnswer():
                    block.text += more
                    continue
                case Thought(text=more), ThinkingAnswer():
                    block.thinking += more
                    continue
                case Arguments(text=more), _:
                    arguments += more
                    continue
            if isinstance(block, ToolUseAnswer):
                # What was cut is told as far as it came: members of a block are no text.
                block.input, arguments = begun_object(arguments), ""
            if block is not None:
                yield block
            match one:
                case Text(text=text):
                    block = TextAnswer(text=text)
                case Thought(text=text):
                    block = ThinkingAnswer(thinking=text, signature=self._id)
                case CallBegun(name=name):
                    block = ToolUseAnswer(id=_call_id(), name=name, input={})

    def _told_as(self, one: Said) -> bytes:
        match one:
            case Text(text=text):
                return self._begun(TextAnswer()) + self._delta_of("text_delta", text=text)
            case Thought(text=text):
                begun = self._begun(ThinkingAnswer(signature=""))
                return begun + self._delta_of("thinking_delta", thinking=text)
            case CallBegun(name=name):
                closed = self._closed()
                return closed + self._begun(ToolUseAnswer(id=_call_id(), name=name, input={}))
            case Arguments(text=text):
                return self._delta_of("input_json_delta", partial_json=text)
            case _:
                assert_never(one)

    def _begun(self, block: TextAnswer | ThinkingAnswer | ToolUseAnswer) -> bytes:
        """What comes before the deltas of such a block; nothing where it is the open one."""
        if self._block == block.type:
            return b""
        closed = self._closed()
        self._block = block.type
        index, self._blocks = self._blocks, self._blocks + 1
        return closed + _event("content_block_start", index=index, content_block=block.model_dump())

    def _closed(self) -> bytes:
        """The end of the open block, if one is open."""
        if not self._block:
            return b""
        signed = self._block == "thinking"
        signature = self._delta_of("signature_delta", signature=self._id) if signed else b""
        self._block = ""
        return signature + _event("content_block_stop", index=self._blocks - 1)

    def _delta_of(self, kind: str, **said: str) -> bytes:
        delta = {"type": kind, **said}
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _message(
        self,
        content: list[TextAnswer | ThinkingAnswer | ToolUseAnswer],
        reason: StopReason | None,
        stop: str | None,
        usage: MessageUsage,
    ) -> dict[str, Any]:
        told = MessageAnswer(
            id=self._id,
            model=self._asked.deployment,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=usage,
        ).model_dump()
        return {**told, "usage": usage.model_dump(exclude_none=True)}

    def _usage_at(self, end: Finished) -> MessageUsage:
        usage = self._usage(end.prompt_tokens, end.cached_prompt_tokens, end.output_tokens)
        thought = self._thought_tokens()
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

    def _note(self, tokens: Tokens) -> None:
        if self._asked.stop:
            self._token_ids += tokens.token_ids

    def _stopped(self, index: int, end: Finished) -> tuple[StopReason, str | None]:
        if end.reason is FinishReason.LENGTH:
            cut = end.output_tokens >= (self._asked.max_tokens or 0)
            return ("max_tokens" if cut else "model_context_window_exceeded"), None
        if stop := self._stop_sequence():
            return "stop_sequence", stop
        calls = index in self._readers and self._readers[index].calls
        return ("tool_use" if calls else "end_turn"), None

    def _stop_sequence(self) -> str | None:
        """The stop sequence that the answer ended at. The answer's text ends before it; its tokens
        spell it.
        """
        if self._bytes_of is None or not self._token_ids:
            return None
        said = b"".join(map(self._bytes_of, self._token_ids)).decode("utf-8", "replace")
        found = [
            (at + len(stop), stop) for stop in self._asked.stop if (at := said.find(stop)) >= 0
        ]
        return min(found)[1] if found else None


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded({"type": kind, **members}))


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
