"""What clients of OpenAI's protocol are answered: its schemas, and the bytes of streamed chunks.

A chunk is written for every token, so it is put together from parts that are encoded once for an
answer; a test holds each of them against its schema. Before: `generation`, which has the events.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal

from pydantic import BaseModel

from mesh.domain.invocation import Accepted, Finished, Tokens
from mesh.domain.reasons import FinishReason
from mesh.http.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenBytes,
    chat_logprobs,
    completion_logprobs,
)
from mesh.http.refusals import encoded
from mesh.text.tool_calls import Arguments, CallBegun, Said, Text, ToolFormat, ToolReader

DONE = b"data: [DONE]\n\n"
FinishText = Literal["stop", "length", "tool_calls"]
_FINISHES: Mapping[FinishReason, FinishText] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """None: not known yet, amid an answer."""


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishText | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class CalledTool(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[CalledTool] | None = None


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolDelta(BaseModel):
    """The first of a call has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishText


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishText | None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str
    hint: str | None = None


class ErrorBody(BaseModel):
    error: Error


class UsageTold(Enum):
    """Of a streamed answer."""

    NEVER = "never"
    LAST = "last"
    """By a chunk of its own, after all others."""
    EACH = "each"
    """By that, and by every chunk of the answer that it belongs to."""


def usage_of(ends: Sequence[Finished]) -> Usage:
    """Of a call's answers together."""
    prompt = sum(end.prompt_tokens for end in ends)
    output = sum(end.output_tokens for end in ends)
    cached = sum(end.cached_prompt_tokens for end in ends)
    return _usage(prompt, output, PromptTokensDetails(cached_tokens=cached))


def _usage(prompt: int, output: int, details: PromptTokensDetails | None = None) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=details,
    )


class Writer:
    """The chunks of one call's answers, and all of it in one piece. `id_` names the call;
    `bytes_of` reads tokens whose log-probabilities were asked for.
    """

    ids: str
    chunk: str
    whole_object: str

    def __init__(
        self,
        id_: str,
        model: str,
        *,
        usage: UsageTold = UsageTold.LAST,
        bytes_of: TokenBytes | None = None,
        tools: ToolFormat | None = None,
    ) -> None:
        """`tools`: how the answer may call those that it was given, if any."""
        self._tools = tools
        self._readers: dict[int, ToolReader] = {}
        """By the answer's number."""
        self._bytes_of = bytes_of
        self._told = usage
        self._prompt_tokens: dict[int, int] = {}
        self._output_tokens: dict[int, int] = {}
        """So far, by the answer's number."""
        self._head = {"id": f"{self.ids}-{id_}", "created": int(time.time()), "model": model}
        opened = encoded({**self._head, "object": self.chunk})[:-1]
        self._before = b"data: " + opened + b',"choices":[{"index":'
        self._after = b"}\n\n" if usage is UsageTold.NEVER else b',"usage":null}\n\n'
        self._last = b"data: " + opened + b',"choices":[],"usage":'

    def accepted(self, index: int, accepted: Accepted) -> None:
        """Before the answer's chunks."""
        self._prompt_tokens[index] = accepted.prompt_tokens

    def opening(self, index: int) -> bytes:
        """What comes before an answer's text."""
        return b""

    def piece(self, index: int, tokens: Tokens) -> bytes:
        """A chunk; nothing for tokens of which there is nothing to tell."""
        self._output_tokens[index] = tokens.first_index + len(tokens.token_ids)
        told = self._logprobs_of(index, tokens)
        if not tokens.text and told is None and self._told is not UsageTold.EACH:
            return b""
        logprobs = b"null" if told is None else told.model_dump_json().encode()
        deltas = self._deltas(index, tokens.text)
        if not deltas and (told is not None or self._told is UsageTold.EACH):
            deltas = [self._delta(None)]
        chunks = [self._chunk(index, delta) for delta in deltas[:-1]]
        chunks += [self._chunk(index, delta, b"null", logprobs) for delta in deltas[-1:]]
        return b"".join(chunks)

    def ending(self, index: int, end: Finished) -> bytes:
        left = b"".join([self._chunk(index, delta) for delta in self._last_deltas(index)])
        finish = _quoted(self._finish(end, self._readers.get(index)))
        return left + self._chunk(index, self._delta(None), finish)

    def usage(self, ends: Sequence[Finished]) -> bytes:
        return self._last + usage_of(ends).model_dump_json().encode() + b"}\n\n"

    def whole(self, answers: Sequence[Tokens], ends: Sequence[Finished]) -> bytes:
        """All tokens and `ends` of the answers, in their order."""
        choices = [
            {
                "index": n,
                **choice,
                "logprobs": told and told.model_dump(),
                "finish_reason": self._finish(end, reader),
            }
            for n, (tokens, end) in enumerate(zip(answers, ends, strict=True))
            for told in [self._logprobs_of(n, tokens)]
            for choice, reader in [self._choice(tokens.text)]
        ]
        told = {**self._head, "object": self.whole_object, "choices": choices}
        return encoded({**told, "usage": usage_of(ends).model_dump()})

    def _finish(self, end: Finished, reader: ToolReader | None) -> FinishText:
        if reader is not None and reader.calls and end.reason is FinishReason.STOP:
            return "tool_calls"
        return _FINISHES[end.reason]

    def _deltas(self, index: int, text: str) -> list[bytes]:
        """Of a further piece of an answer's text."""
        return [self._delta(_quoted(text))]

    def _last_deltas(self, index: int) -> list[bytes]:
        """What was held back."""
        return []

    def _chunk(
        self, index: int, delta: bytes, finish: bytes = b"null", logprobs: bytes = b"null"
    ) -> bytes:
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._before,
            index,
            delta,
            logprobs,
            finish,
            self._usage_after(index) if self._told is UsageTold.EACH else self._after,
        )

    def _usage_after(self, index: int) -> bytes:
        told = _usage(self._prompt_tokens.get(index, 0), self._output_tokens.get(index, 0))
        return b',"usage":' + told.model_dump_json().encode() + b"}\n\n"

    def _logprobs_of(self, index: int, tokens: Tokens) -> ChatLogprobs | CompletionLogprobs | None:
        if self._bytes_of is None or not tokens.logprobs:
            return None
        return self._logprobs(index, tokens, self._bytes_of)

    def _logprobs(
        self, index: int, tokens: Tokens, bytes_of: TokenBytes
    ) -> ChatLogprobs | CompletionLogprobs:
        raise NotImplementedError

    def _delta(self, text: bytes | None) -> bytes:
        raise NotImplementedError

    def _choice(self, text: str) -> tuple[dict[str, object], ToolReader | None]:
        """Of a whole answer, and who has read its calls."""
        raise NotImplementedError


class CompletionWriter(Writer):
    ids, chunk, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        id_: str,
        model: str,
        *,
        usage: UsageTold = UsageTold.LAST,
        bytes_of: TokenBytes | None = None,
        tools: ToolFormat | None = None,
    ) -> None:
        super().__init__(id_, model, usage=usage, bytes_of=bytes_of)
        self._chars: dict[int, int] = {}
        """Of the tokens told so far, by the answer's number."""

    def _logprobs(self, index: int, tokens: Tokens, bytes_of: TokenBytes) -> CompletionLogprobs:
        told = completion_logprobs(tokens, bytes_of, self._chars.get(index, 0))
        self._chars[index] = told.text_offset[-1] + len(told.tokens[-1])
        return told

    def _delta(self, text: bytes | None) -> bytes:
        return b'"text":%b' % (text or b'""')

    def _choice(self, text: str) -> tuple[dict[str, object], ToolReader | None]:
        return {"text": text}, None


class ChatWriter(Writer):
    ids, chunk, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def _logprobs(self, index: int, tokens: Tokens, bytes_of: TokenBytes) -> ChatLogprobs:
        return chat_logprobs(tokens, bytes_of)

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}')

    def _delta(self, text: bytes | None) -> bytes:
        return b'"delta":{}' if text is None else b'"delta":{"content":%b}' % text

    def _deltas(self, index: int, text: str) -> list[bytes]:
        if self._tools is None:
            return super()._deltas(index, text) if text else []
        reader = self._readers.setdefault(index, ToolReader(self._tools))
        return [self._said(one) for one in reader.push(text)]

    def _last_deltas(self, index: int) -> list[bytes]:
        reader = self._readers.get(index)
        return [] if reader is None else [self._said(one) for one in reader.finish()]

    def _said(self, one: Said) -> bytes:
        match one:
            case Text(text=text):
                return self._delta(_quoted(text))
            case CallBegun():
                told = ToolDelta(
                    index=one.index,
                    id=_call_id(),
                    type="function",
                    function=FunctionDelta(name=one.name, arguments=""),
                )
            case Arguments():
                told = ToolDelta(index=one.index, function=FunctionDelta(arguments=one.text))
        return b'"delta":{"tool_calls":[%b]}' % told.model_dump_json(exclude_none=True).encode()

    def _choice(self, text: str) -> tuple[dict[str, object], ToolReader | None]:
        if self._tools is None:
            message = AnswerMessage(content=text)
            return {"message": message.model_dump(exclude={"tool_calls"})}, None
        reader = ToolReader(self._tools)
        content, calls = "", list[CalledTool]()
        for one in (*reader.push(text), *reader.finish()):
            match one:
                case Text(text=more):
                    content += more
                case CallBegun(name=name):
                    function = CalledFunction(name=name, arguments="")
                    calls.append(CalledTool(id=_call_id(), function=function))
                case Arguments(text=more):
                    calls[-1].function.arguments += more
        message = AnswerMessage(content=content or None, tool_calls=calls or None)
        return {"message": message.model_dump()}, reader


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
