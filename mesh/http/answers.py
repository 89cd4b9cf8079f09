"""What clients of OpenAI's protocol are answered: its schemas, and the bytes of streamed chunks.

A chunk is written for every token, so it is put together from parts that are encoded once for an
answer; a test holds each of them against its schema. Before: `generation`, which has the events.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from mesh.domain.invocation import Finished, Tokens
from mesh.domain.reasons import FinishReason
from mesh.http.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenBytes,
    chat_logprobs,
    completion_logprobs,
)
from mesh.http.refusals import encoded

DONE = b"data: [DONE]\n\n"
FinishText = Literal["stop", "length"]
_FINISHES: Mapping[FinishReason, FinishText] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


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


def usage_of(ends: Sequence[Finished]) -> Usage:
    """Of a call's answers together."""
    prompt = sum(end.prompt_tokens for end in ends)
    output = sum(end.output_tokens for end in ends)
    return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


class Writer:
    """The chunks of one call's answers, and all of it in one piece. `id_` names the call;
    `bytes_of` reads tokens whose log-probabilities were asked for.
    """

    ids: str
    chunk: str
    whole_object: str

    def __init__(
        self, id_: str, model: str, *, with_usage: bool, bytes_of: TokenBytes | None = None
    ) -> None:
        self._bytes_of = bytes_of
        self._head = {"id": f"{self.ids}-{id_}", "created": int(time.time()), "model": model}
        opened = encoded({**self._head, "object": self.chunk})[:-1]
        self._before = b"data: " + opened + b',"choices":[{"index":'
        self._after = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._last = b"data: " + opened + b',"choices":[],"usage":'

    def opening(self, index: int) -> bytes:
        """What comes before an answer's text."""
        return b""

    def piece(self, index: int, tokens: Tokens) -> bytes:
        """A chunk; nothing for tokens that have neither text nor log-probabilities to tell."""
        told = self._logprobs_of(index, tokens)
        if not tokens.text and told is None:
            return b""
        logprobs = b"null" if told is None else told.model_dump_json().encode()
        return self._chunk(index, self._delta(_quoted(tokens.text)), b"null", logprobs)

    def ending(self, index: int, end: Finished) -> bytes:
        return self._chunk(index, self._delta(None), _quoted(_FINISHES[end.reason]))

    def usage(self, ends: Sequence[Finished]) -> bytes:
        return self._last + usage_of(ends).model_dump_json().encode() + b"}\n\n"

    def whole(self, answers: Sequence[Tokens], ends: Sequence[Finished]) -> bytes:
        """All tokens and `ends` of the answers, in their order."""
        choices = [
            {
                "index": n,
                **self._choice(tokens.text),
                "logprobs": told and told.model_dump(),
                "finish_reason": _FINISHES[end.reason],
            }
            for n, (tokens, end) in enumerate(zip(answers, ends, strict=True))
            for told in [self._logprobs_of(n, tokens)]
        ]
        told = {**self._head, "object": self.whole_object, "choices": choices}
        return encoded({**told, "usage": usage_of(ends).model_dump()})

    def _chunk(self, index: int, delta: bytes, finish: bytes, logprobs: bytes = b"null") -> bytes:
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._before,
            index,
            delta,
            logprobs,
            finish,
            self._after,
        )

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

    def _choice(self, text: str) -> dict[str, object]:
        raise NotImplementedError


class CompletionWriter(Writer):
    ids, chunk, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, id_: str, model: str, *, with_usage: bool, bytes_of: TokenBytes | None = None
    ) -> None:
        super().__init__(id_, model, with_usage=with_usage, bytes_of=bytes_of)
        self._chars: dict[int, int] = {}
        """Of the tokens told so far, by the answer's number."""

    def _logprobs(self, index: int, tokens: Tokens, bytes_of: TokenBytes) -> CompletionLogprobs:
        told = completion_logprobs(tokens, bytes_of, self._chars.get(index, 0))
        self._chars[index] = told.text_offset[-1] + len(told.tokens[-1])
        return told

    def _delta(self, text: bytes | None) -> bytes:
        return b'"text":%b' % (text or b'""')

    def _choice(self, text: str) -> dict[str, object]:
        return {"text": text}


class ChatWriter(Writer):
    ids, chunk, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def _logprobs(self, index: int, tokens: Tokens, bytes_of: TokenBytes) -> ChatLogprobs:
        return chat_logprobs(tokens, bytes_of)

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null")

    def _delta(self, text: bytes | None) -> bytes:
        return b'"delta":{}' if text is None else b'"delta":{"content":%b}' % text

    def _choice(self, text: str) -> dict[str, object]:
        return {"message": AnswerMessage(content=text).model_dump()}


def _quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
