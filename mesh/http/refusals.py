"""An error of the tree as HTTP clients of OpenAI's protocol understand it: status, headers, body.

Official clients obey `x-should-retry`, `retry-after-ms` and `Retry-After`, in this order; LiteLLM
tells a prompt that is too long by the message.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from mesh.domain.errors import InvalidInput, MeshError, Refused
from mesh.domain.reasons import RefusalReason
from mesh.wire.statuses import status_for

Header = tuple[bytes, bytes]
JSON: Header = (b"content-type", b"application/json")
_TYPES = {429: "rate_limit_error"}
"""By status; of the others, those below 500 are the caller's, the rest are ours."""


def status_and_code(error: MeshError) -> tuple[int, str]:
    status = status_for(error)
    return status.http, status.openai


def body_of(
    error: MeshError, *, status: int, code: str, context_tokens: int | None = None
) -> dict[str, Any]:
    """`context_tokens`: of the deployment that was asked, where that is known."""
    message = error.message
    long = isinstance(error, Refused) and error.reason is RefusalReason.PROMPT_TOO_LONG
    if long and context_tokens is not None:
        message = f"This model's maximum context length is {context_tokens} tokens: {message}"
    told = {
        "message": message,
        "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": (error.field if isinstance(error, InvalidInput) else "") or None,
        "code": code,
    }
    return {"error": {**told, "hint": error.hint} if error.hint else told}


def encoded(value: Any) -> bytes:
    """As UTF-8, whatever was given back of what a client sent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def retry_headers(error: MeshError) -> Iterator[Header]:
    """When to come again, or that it does not help."""
    if not isinstance(error, Refused):
        return
    if error.retry_after_s > 0:
        yield b"retry-after", b"%d" % math.ceil(error.retry_after_s)
        yield b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)
    else:
        yield b"x-should-retry", b"false"
