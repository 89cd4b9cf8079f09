"""An error of the tree as HTTP clients understand it, each in its protocol: status, headers, body.

Official clients of both obey `x-should-retry`, `retry-after-ms` and `Retry-After`, in this order;
LiteLLM tells a prompt that is too long by the message.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response

from mesh.domain.errors import InvalidInput, MeshError, Refused
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import dataclass, replace
from mesh.wire.errors import ERROR_KEY, REASON_KEY, status_for

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
EVENT_STREAM = "text/event-stream; charset=utf-8"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_TYPES = {429: "rate_limit_error"}
"""By status; of the others, those below 500 are the caller's, the rest are ours."""


_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's, likewise."""


def status_and_code(error: MeshError) -> tuple[int, str]:
    status = status_for(error)
    return status.http, status.openai


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that ends a call, and what is known of the call."""

    error: MeshError
    status: int
    code: str
    context_tokens: int | None = None
    """Those of the deployment that was asked."""
    request_id: str = ""


_SLO_NAMES = {
    "slo_class": "service_tier",
    "slo_ttft_s": "x-slo-ttft-ms",
    "slo_tpot_s": "x-slo-tpot-ms",
}
"""What every protocol calls them: a member, and two headers."""
Told = tuple[int, dict[str, Any]]
"""The status and the body of an answer."""


def in_openai(failure: Failure) -> Told:
    error, status = failure.error, failure.status
    message = error.message
    long = isinstance(error, Refused) and error.reason is RefusalReason.PROMPT_TOO_LONG
    if long and failure.context_tokens is not None:
        longest = f"This model's maximum context length is {failure.context_tokens} tokens"
        message = f"{longest}: {message}"
    told = {
        "message": message,
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": (error.field if isinstance(error, InvalidInput) else "") or None,
        "code": failure.code,
    }
    return status, {"error": {**told, "hint": error.hint} if error.hint else told}


def _in_anthropic(failure: Failure) -> Told:
    """Clients tell a prompt that is too long by the message, which alone has room for a hint."""
    error = failure.error
    status = 529 if failure.status == 503 else failure.status
    long = failure.code == "context_length_exceeded"
    message = f"prompt is too long: {error.message}" if long else error.message
    other = "invalid_request_error" if status < 500 else "api_error"
    told = {
        "type": _MESSAGES_TYPES.get(status, other),
        "message": f"{message} ({error.hint})" if error.hint else message,
    }
    return status, {"type": "error", "error": told, "request_id": failure.request_id or None}


def _in_ollama(failure: Failure) -> Told:
    error = failure.error
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return failure.status, {"error": message}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a protocol tells of errors, and the headers in which it tells a request's id."""

    in_words: Callable[[Failure], Told]
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    names: Mapping[str, str] = field(default_factory=dict)
    """What the protocol calls members that OpenAI's chats call otherwise."""

    def refusal(self, failure: Failure) -> Told:
        error = failure.error
        named = {**_SLO_NAMES, **self.names}
        own = named.get(error.field) if isinstance(error, InvalidInput) else None
        if own is not None and isinstance(error, InvalidInput):
            message = error.message
            if message.startswith(f"{error.field} "):
                message = own + message.removeprefix(error.field)
            failure = replace(failure, error=InvalidInput(message, hint=error.hint, field=own))
        return self.in_words(failure)


_OPENAI = Dialect(in_openai)
_RESPONSES = Dialect(
    in_openai,
    names={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "chat_template_kwargs": "reasoning",
    },
)
_DETOKENIZE = Dialect(in_openai, names={"prompt": "tokens"})
_OLLAMA = Dialect(
    _in_ollama,
    names={"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"},
)
_ANTHROPIC = Dialect(_in_anthropic, (b"x-request-id", b"request-id"))


def dialect_of(path: str) -> Dialect:
    """Anthropic's and Ollama's for their own paths, OpenAI's for all others."""
    if path.startswith("/v1/responses"):
        return _RESPONSES
    if path == "/detokenize":
        return _DETOKENIZE
    if path.startswith("/api/") and not path.startswith("/api/v1/"):
        return _OLLAMA
    return _ANTHROPIC if path.startswith("/v1/messages") else _OPENAI


def error_event(failure: Failure, body: bytes) -> bytes:
    """How most protocols tell of one amid a stream of events."""
    return b"event: error\ndata: " + body + b"\n\n"


def encoded(value: Any) -> bytes:
    """JSON in UTF-8, whatever was given back of what a client sent."""
    try:
        return to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        return _ENCODER.encode(value).encode("utf-8", "replace")  # it has half a character


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encoded(value), status, media_type="application/json")


def error_headers(error: MeshError) -> Iterator[Header]:
    """What it is, as gRPC's metadata say it to an edge that may ask another controller or front,
    and when to come again, or that it does not help.
    """
    yield ERROR_KEY.encode(), type(error).__name__.encode()
    if not isinstance(error, Refused):
        return
    yield REASON_KEY.encode(), error.reason.encode()
    if error.retry_after_s > 0:
        yield b"retry-after", b"%d" % math.ceil(error.retry_after_s)
        yield b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)
    elif error.reason is not RefusalReason.SHUTTING_DOWN:  # another may answer at once
        yield b"x-should-retry", b"false"
