"""What clients of OpenAI's protocol are answered: its schemas, and the bytes of streamed chunks.

A chunk is written for every token, so it is put together from parts that are encoded once for an
answer; a test holds each of them against its schema. Before: `generation`, which has the events.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from mesh.domain.invocation import Finished
from mesh.domain.reasons import FinishReason
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
    logprobs: None = None
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
    logprobs: None = None
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
    logprobs: None = None
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
    """The chunks of one call's answers, and all of it in one piece. `id_` names the call."""

    ids: str
    chunk: str
    whole_object: str

    def __init__(self, id_: str, model: str, *, with_usage: bool) -> None:
        self._head = {"id": f"{self.ids}-{id_}", "created": int(time.time()), "model": model}
        opened = encoded({**self._head, "object": self.chunk})[:-1]
        self._before = b"data: " + opened + b',"choices":[{"index":'
        self._after = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._last = b"data: " + opened + b',"choices":[],"usage":'

    def opening(self, index: int) -> bytes:
        """What comes before an answer's text."""
        return b""

    def piece(self, index: int, text: str) -> bytes:
        """A chunk of text that is not empty."""
        return self._chunk(index, self._delta(_quoted(text)), b"null")

    def ending(self, index: int, end: Finished) -> bytes:
        return self._chunk(index, self._delta(None), _quoted(_FINISHES[end.reason]))

    def usage(self, ends: Sequence[Finished]) -> bytes:
        return self._last + usage_of(ends).model_dump_json().encode() + b"}\n\n"

    def whole(self, texts: Sequence[str], ends: Sequence[Finished]) -> bytes:
        """`texts` and `ends` of the answers, in their order."""
        choices = [
            {
                "index": n,
                **self._choice(text),
                "logprobs": None,
                "finish_reason": _FINISHES[end.reason],
            }
            for n, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]
        told = {**self._head, "object": self.whole_object, "choices": choices}
        return encoded({**told, "usage": usage_of(ends).model_dump()})

    def _chunk(self, index: int, delta: bytes, finish: bytes) -> bytes:
        return b'%b%d,%b,"logprobs":null,"finish_reason":%b}]%b' % (
            self._before,
            index,
            delta,
            finish,
            self._after,
        )

    def _delta(self, text: bytes | None) -> bytes:
        raise NotImplementedError

    def _choice(self, text: str) -> dict[str, object]:
        raise NotImplementedError


class CompletionWriter(Writer):
    ids, chunk, whole_object = "cmpl", "text_completion", "text_completion"

    def _delta(self, text: bytes | None) -> bytes:
        return b'"text":%b' % (text or b'""')

    def _choice(self, text: str) -> dict[str, object]:
        return {"text": text}


class ChatWriter(Writer):
    ids, chunk, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null")

    def _delta(self, text: bytes | None) -> bytes:
        return b'"delta":{}' if text is None else b'"delta":{"content":%b}' % text

    def _choice(self, text: str) -> dict[str, object]:
        return {"message": AnswerMessage(content=text).model_dump()}


def _quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
