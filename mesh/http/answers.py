"""What clients of OpenAI's protocol are answered: its schemas, and the bytes of streamed chunks.

A chunk is written for every token, so it is put together from parts that are encoded once for an
answer; a test holds each of them against its schema. Before: `generation`, which has the events.
"""

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel

from mesh.domain.invocation import Accepted, Finished, Invocation, Tokens
from mesh.domain.reasons import FinishReason
from mesh.domain.text import ToolFormat
from mesh.domain.values import dataclass, replace
from mesh.http.logprobs import (
    Characters,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenBytes,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from mesh.http.refusals import EVENT_STREAM, Failure, encoded, error_event
from mesh.text.answer_reader import NOTHING_ELSE, AnswerReader, Reading, Said
from mesh.text.thoughts import Thought
from mesh.text.tool_calls import Arguments, CallBegun, Text

DONE = b"data: [DONE]\n\n"
FinishText = Literal["stop", "length", "tool_calls"]
_FINISHES: Mapping[FinishReason, FinishText] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """How many of the prompt tokens were cached; `None` amid an answer, when it is not yet
    known.
    """
    completion_tokens_details: CompletionTokensDetails | None = None
    """Left out: that, or the model does not think aloud."""

    def told(self) -> dict[str, Any]:
        unknown = {"completion_tokens_details"} if self.completion_tokens_details is None else None
        return self.model_dump(exclude=unknown)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Left out, where they were not asked for."""
    finish_reason: FinishText | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: str | None = None
    """The SLO class; left out, where its deployment has none."""
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
    reasoning_content: str | None = None
    """What the model thought aloud before; absent where it does not."""
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
    service_tier: str | None = None
    """The SLO class; left out, where its deployment has none."""
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    """Left out, where they were not asked for."""
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
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
    service_tier: str | None = None
    """The SLO class; left out, where its deployment has none."""
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
    """When a streamed answer tells its usage."""

    NEVER = "never"
    LAST = "last"
    """By a chunk of its own, after all others."""
    EACH = "each"
    """By that, and by every chunk of the answer that it belongs to."""


def usage_of(
    ends: Sequence[Finished], thought_tokens: int | None = None, answers: int = 1
) -> Usage:
    """The usage of a call's answers together, in their order, of which each `answers` are to one
    prompt. `thought_tokens` is how many of their tokens were thoughts.
    """
    firsts, output = ends[::answers], sum(end.output_tokens for end in ends)
    told = _usage(sum(end.prompt_tokens for end in firsts), output)
    cached = sum(end.cached_prompt_tokens for end in firsts)
    told.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
    if thought_tokens is not None:
        told.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=thought_tokens)
    return told


def _usage(prompt: int, output: int) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTo:
    """What a writer has to know of its call."""

    id_: str = ""
    slo_class: str = ""
    asked: Invocation
    """Its first invocation."""
    answers: int = 1
    """How many answers each of its prompts has."""
    answers_shown: int = 1
    """How many of them the client is given: the likeliest ones."""
    usage: UsageTold = UsageTold.LAST
    """When a stream tells its usage."""
    bytes_of: TokenBytes | None = None
    """Reads tokens whose log-probabilities were asked for."""
    reading: Reading = NOTHING_ELSE
    """What the answers of a chat may hold beside words."""

    @property
    def answers_sharing(self) -> int:
        """How many answers share the computation of their prompt: those with log-probabilities of
        prompts each compute it.
        """
        return self.answers if self.asked.prompt_logprobs is None else 1


class Writer(ABC):
    """The answers of one call in a protocol: as a stream, or whole. `index` is an answer's
    number.
    """

    stream_type = EVENT_STREAM

    def __init__(self, to: AnswerTo) -> None:
        self._to = to
        self._prompt_tokens: dict[int, int] = {}

    def accepted(self, index: int, accepted: Accepted) -> None:
        """Before all that is told of the answer."""
        self._prompt_tokens[index] = accepted.prompt_tokens

    def opening(self, index: int) -> bytes:
        """What comes before an answer's text."""
        return b""

    @abstractmethod
    def piece(self, index: int, tokens: Tokens) -> bytes:
        """More of an answer; empty for tokens of which there is nothing to tell."""

    @abstractmethod
    def ending(self, index: int, end: Finished) -> bytes:
        """What comes after an answer's text."""

    def closing(self, ends: Sequence[Finished]) -> bytes:
        """What comes after all answers."""
        return b""

    def failing(self, failure: Failure, body: bytes) -> bytes:
        """The end of a stream that fails; `body` is what would be told before it had begun."""
        return error_event(failure, body)

    @abstractmethod
    def whole(self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]) -> bytes:
        """All of it in one piece: all tokens and `ends` of the answers, in their order."""


class ChunkWriter(Writer):
    """Answers by chunks of one shape, each of which tells more of one answer."""

    ids: str
    chunk: str
    whole_object: str

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._bytes_of = to.bytes_of
        self._told = to.usage
        self._output_tokens: dict[int, int] = {}
        """The output tokens so far, by the answer's number."""
        self._head: dict[str, object] = {"id": f"{self.ids}-{to.id_}", "created": int(time.time())}
        self._head["model"] = to.asked.deployment
        if to.slo_class:
            self._head["service_tier"] = to.slo_class
        opened = encoded({**self._head, "object": self.chunk})[:-1]
        self._before = b"data: " + opened + b',"choices":[{"index":'
        self._after = b"}\n\n" if to.usage is UsageTold.NEVER else b',"usage":null}\n\n'
        self._last = b"data: " + opened + b',"choices":[],"usage":'

    def piece(self, index: int, tokens: Tokens) -> bytes:
        self._output_tokens[index] = tokens.first_index + len(tokens.token_ids)
        deltas, told = self._deltas(index, tokens), self._logprobs_of(index, tokens)
        if not deltas and (told is not None or self._told is UsageTold.EACH):
            deltas = [self._delta(None)]
        logprobs = b"null" if told is None else told.model_dump_json().encode()
        chunks = [self._chunk(index, delta) for delta in deltas[:-1]]
        chunks += [self._chunk(index, delta, b"null", logprobs) for delta in deltas[-1:]]
        return b"".join(chunks)

    def ending(self, index: int, end: Finished) -> bytes:
        left = b"".join([self._chunk(index, delta) for delta in self._last_deltas(index)])
        return left + self._chunk(index, self._delta(None), encoded(self._finish(index, end)))

    def closing(self, ends: Sequence[Finished]) -> bytes:
        if self._told is UsageTold.NEVER:
            return DONE
        told = usage_of(ends, self._thought_tokens(), self._to.answers_sharing)
        return self._last + encoded(told.told()) + b"}\n\n" + DONE

    def whole(self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]) -> bytes:
        choices = [
            {
                "index": n,
                **self._choice(n, parts),
                "logprobs": told and told.model_dump(),
                "finish_reason": self._finish(n, end),
            }
            for n, (parts, end) in enumerate(self._best(answers, ends))
            for told in [self._logprobs_of(n, _joined(parts))]
        ]
        told = {**self._head, "object": self.whole_object, "choices": choices}
        told |= self._beside(answers)
        usage = usage_of(ends, self._thought_tokens(), self._to.answers_sharing)
        return encoded({**told, "usage": usage.told()})

    def _best(
        self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]
    ) -> list[tuple[Sequence[Tokens], Finished]]:
        """Those answers to each prompt that are told: the likeliest by the token."""
        made, count = list(zip(answers, ends, strict=True)), self._to.answers
        told = self._to.answers_shown
        if count == told:
            return made
        prompts = [made[begin : begin + count] for begin in range(0, len(made), count)]
        return [
            best
            for of_prompt in prompts
            for best in sorted(of_prompt, key=lambda one: -_mean_logprob(one[0]))[:told]
        ]

    def _beside(self, answers: Sequence[Sequence[Tokens]]) -> dict[str, object]:
        """What a whole answer tells beside its choices."""
        return {}

    def _prompt_told(self, parts: Sequence[Tokens]) -> dict[str, object]:
        """The log-probabilities of an answer's prompt, where they are told apart from it."""
        if self._bytes_of is None or not parts or not parts[0].prompt_token_ids:
            return {}
        told = [
            None if one is None else {token: place.model_dump() for token, place in one.items()}
            for one in prompt_logprobs(parts[0], self._bytes_of)
        ]
        return {"prompt_logprobs": told}

    def _finish(self, index: int, end: Finished) -> FinishText:
        return _FINISHES[end.reason]

    def _thought_tokens(self) -> int | None:
        """The thought tokens of all answers, or `None` when the model does not think aloud."""
        return None

    def _deltas(self, index: int, tokens: Tokens) -> list[bytes]:
        """The deltas of a further piece of an answer."""
        return [self._delta(encoded(tokens.text))] if tokens.text else []

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
        return b',"usage":' + encoded(told.told()) + b"}\n\n"

    def _logprobs_of(self, index: int, tokens: Tokens) -> ChatLogprobs | CompletionLogprobs | None:
        told = tokens.logprobs or tokens.prompt_token_ids
        if self._bytes_of is None or self._to.asked.logprobs is None or not told:
            return None
        return self._logprobs(index, tokens, self._bytes_of)

    def _logprobs(
        self, index: int, tokens: Tokens, bytes_of: TokenBytes
    ) -> ChatLogprobs | CompletionLogprobs:
        raise NotImplementedError

    def _delta(self, text: bytes | None) -> bytes:
        raise NotImplementedError

    def _choice(self, index: int, parts: Sequence[Tokens]) -> dict[str, object]:
        """The choice that a whole answer makes."""
        raise NotImplementedError


class CompletionWriter(ChunkWriter):
    """`echo`: the prompt is told before its answer, and alone where `only`. `tells_prompt`: its
    log-probabilities are told apart.
    """

    ids, chunk, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, to: AnswerTo, *, echo: bool = False, only: bool = False, tells_prompt: bool = False
    ) -> None:
        super().__init__(to)
        self._echo, self._only, self._tells_prompt = echo, only, tells_prompt
        self._characters: defaultdict[int, Characters] = defaultdict(Characters)
        """By the answer's number."""

    def _logprobs(self, index: int, tokens: Tokens, bytes_of: TokenBytes) -> CompletionLogprobs:
        return completion_logprobs(tokens, bytes_of, self._characters[index], echo=self._echo)

    def piece(self, index: int, tokens: Tokens) -> bytes:
        return super().piece(index, self._shown(tokens))

    def ending(self, index: int, end: Finished) -> bytes:
        return super().ending(index, self._shown_end(end))

    def closing(self, ends: Sequence[Finished]) -> bytes:
        return super().closing(list(map(self._shown_end, ends)))

    def whole(self, answers: Sequence[Sequence[Tokens]], ends: Sequence[Finished]) -> bytes:
        shown = [list(map(self._shown, parts)) for parts in answers]
        return super().whole(shown, list(map(self._shown_end, ends)))

    def _shown(self, tokens: Tokens) -> Tokens:
        if self._only:
            tokens = replace(tokens, token_ids=(), text="", logprobs=())
        if self._echo and self._bytes_of is not None:
            prompt = b"".join(map(self._bytes_of, tokens.prompt_token_ids))
            tokens = replace(tokens, text=prompt.decode("utf-8", "replace") + tokens.text)
        return tokens

    def _shown_end(self, end: Finished) -> Finished:
        return replace(end, output_tokens=0, reason=FinishReason.LENGTH) if self._only else end

    def _delta(self, text: bytes | None) -> bytes:
        return b'"text":%b' % (text or b'""')

    def _choice(self, index: int, parts: Sequence[Tokens]) -> dict[str, object]:
        told = self._prompt_told(parts) if self._tells_prompt else {}
        return {"text": "".join(part.text for part in parts), **told}


class ChatWriter(ChunkWriter):
    ids, chunk, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._reading = to.reading
        self._readers: dict[int, AnswerReader] = {}
        """By the answer's number."""

    def _logprobs(self, index: int, tokens: Tokens, bytes_of: TokenBytes) -> ChatLogprobs:
        return chat_logprobs(tokens, bytes_of)

    def _beside(self, answers: Sequence[Sequence[Tokens]]) -> dict[str, object]:
        return self._prompt_told(answers[0])

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'"delta":{"role":"assistant","content":""}')

    def _delta(self, text: bytes | None) -> bytes:
        return b'"delta":{}' if text is None else b'"delta":{"content":%b}' % text

    def _deltas(self, index: int, tokens: Tokens) -> list[bytes]:
        if not self._reading:
            return super()._deltas(index, tokens)
        return [self._said(one) for one in self._read(index, tokens)]

    def _last_deltas(self, index: int) -> list[bytes]:
        reader = self._readers.get(index)
        return [] if reader is None else [self._said(one) for one in reader.finish()]

    def _read(self, index: int, tokens: Tokens) -> list[Said]:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = AnswerReader(self._reading)
        return reader.push(tokens.text, len(tokens.token_ids))

    def _finish(self, index: int, end: Finished) -> FinishText:
        reader = self._readers.get(index)
        if reader is not None and reader.calls and end.reason is FinishReason.STOP:
            return "tool_calls"
        return super()._finish(index, end)

    def _thought_tokens(self) -> int | None:
        if self._reading.thinking is None:
            return None
        return sum(reader.thought_tokens for reader in self._readers.values())

    def _said(self, one: Said) -> bytes:
        match one:
            case Text(text=text):
                return self._delta(encoded(text))
            case Thought(text=text):
                return b'"delta":{"reasoning_content":%b}' % encoded(text)
            case CallBegun():
                told = ToolDelta(
                    index=one.index,
                    id=call_id(),
                    type="function",
                    function=FunctionDelta(name=one.name, arguments=""),
                )
            case Arguments():
                told = ToolDelta(index=one.index, function=FunctionDelta(arguments=one.text))
        return b'"delta":{"tool_calls":[%b]}' % told.model_dump_json(exclude_none=True).encode()

    def _choice(self, index: int, parts: Sequence[Tokens]) -> dict[str, object]:
        said = [one for part in parts for one in self._read(index, part)]
        if index in self._readers:
            said += self._readers[index].finish()
        content, thought, calls = "", "", list[CalledTool]()
        for one in said:
            match one:
                case Text(text=more):
                    content += more
                case Thought(text=more):
                    thought += more
                case CallBegun(name=name):
                    function = CalledFunction(name=name, arguments="")
                    calls.append(CalledTool(id=call_id(), function=function))
                case Arguments(text=more):
                    calls[-1].function.arguments += more
        message = AnswerMessage(
            content=content if content or not self._reading else None,
            reasoning_content=thought or None,
            tool_calls=calls or None,
        )
        unread = {"tool_calls"} if self._reading.tools is ToolFormat.NONE else set[str]()
        unread |= set[str]() if self._reading.thinking else {"reasoning_content"}
        return {"message": message.model_dump(exclude=unread)}


def _mean_logprob(parts: Sequence[Tokens]) -> float:
    logprobs = [one.logprob for part in parts for one in part.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _joined(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(
        first_index=0,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text="".join(part.text for part in parts),
        logprobs=tuple(told for part in parts for told in part.logprobs),
        prompt_token_ids=parts[0].prompt_token_ids if parts else (),
        prompt_logprobs=parts[0].prompt_logprobs if parts else (),
    )


def call_id(kind: str = "call") -> str:
    return f"{kind}_{secrets.token_hex(12)}"
