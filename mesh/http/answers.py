"""What clients of OpenAI's protocol are answered: its schemas, and the bytes of streamed chunks.

A chunk is written for every token, so it is put together from parts that are encoded once for an
answer; a test holds each of them against its schema. Before: `generation`, which has the events.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from mesh.domain.invocation import Finished, Tokens
from mesh.domain.reasons import FinishReason
from mesh.domain.request import TokenLogprobs
from mesh.http.refusals import encoded

DONE = b"data: [DONE]\n\n"
Given = Sequence[tuple[str, TokenLogprobs]]
"""Tokens' texts, and how likely they were."""
FinishText = Literal["stop", "length"]
_FINISHES: Mapping[FinishReason, FinishText] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TokenChance(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """None: a part of a character."""


class TokenLogprob(TokenChance):
    top_logprobs: list[TokenChance]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


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
    """The chunks of one call's answers, and all of it in one piece. `id_` names the call, `text_of`
    gives the text of a token where log-probabilities are told.
    """

    ids: str
    chunk: str
    whole_object: str

    def __init__(
        self,
        id_: str,
        model: str,
        *,
        with_usage: bool,
        text_of: Callable[[int], str] | None = None,
    ) -> None:
        self._text_of = text_of
        self._told: dict[int, int] = {}
        """Characters of each answer that were told."""
        self._head = {"id": f"{self.ids}-{id_}", "created": int(time.time()), "model": model}
        opened = encoded({**self._head, "object": self.chunk})[:-1]
        self._before = b"data: " + opened + b',"choices":[{"index":'
        self._after = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._last = b"data: " + opened + b',"choices":[],"usage":'

    def opening(self, index: int) -> bytes:
        """What comes before an answer's text."""
        return b""

    def piece(self, index: int, tokens: Tokens) -> bytes:
        """A chunk; nothing where there is nothing to tell yet."""
        told = self._logprobs(index, (tokens,))
        if not tokens.text and told is None:
            return b""
        logprobs = b"null" if told is None else encoded(told)
        return self._chunk(index, self._delta(_quoted(tokens.text)), b"null", logprobs)

    def ending(self, index: int, end: Finished) -> bytes:
        return self._chunk(index, self._delta(None), _quoted(_FINISHES[end.reason]))

    def usage(self, ends: Sequence[Finished]) -> bytes:
        return self._last + usage_of(ends).model_dump_json().encode() + b"}\n\n"

    def whole(self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]) -> bytes:
        """`answers` and their `ends`, in their order."""
        choices = [
            {
                "index": n,
                **self._choice("".join(tokens.text for tokens in answer)),
                "logprobs": self._logprobs(n, answer),
                "finish_reason": _FINISHES[end.reason],
            }
            for n, (answer, end) in enumerate(zip(answers, ends, strict=True))
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

    def _logprobs(self, index: int, answer: Sequence[Tokens]) -> dict[str, Any] | None:
        """Of some tokens of an answer; None where they were not asked for."""
        text_of = self._text_of
        if text_of is None:
            return None
        given = [
            (text_of(token_id), one)
            for tokens in answer
            for token_id, one in zip(tokens.token_ids, tokens.logprobs, strict=False)
        ]
        return self._told_of(index, given, text_of)

    def _told_of(self, index: int, given: Given, text_of: Callable[[int], str]) -> dict[str, Any]:
        raise NotImplementedError

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

    def _told_of(self, index: int, given: Given, text_of: Callable[[int], str]) -> dict[str, Any]:
        offsets, at = [], self._told.get(index, 0)
        for text, _ in given:
            offsets.append(at)
            at += len(text)
        self._told[index] = at
        likely = [{text_of(other): chance for other, chance in one.top} for _, one in given]
        return {
            "tokens": [text for text, _ in given],
            "token_logprobs": [one.logprob for _, one in given],
            "top_logprobs": likely if any(likely) else None,
            "text_offset": offsets,
        }


class ChatWriter(Writer):
    ids, chunk, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null")

    def _delta(self, text: bytes | None) -> bytes:
        return b'"delta":{}' if text is None else b'"delta":{"content":%b}' % text

    def _choice(self, text: str) -> dict[str, object]:
        return {"message": AnswerMessage(content=text).model_dump()}

    def _told_of(self, index: int, given: Given, text_of: Callable[[int], str]) -> dict[str, Any]:
        content = [
            {
                **_chance(text, one.logprob),
                "top_logprobs": [_chance(text_of(other), chance) for other, chance in one.top],
            }
            for text, one in given
        ]
        return {"content": content, "refusal": None}


def _chance(text: str, logprob: float) -> dict[str, Any]:
    whole = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def _quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
