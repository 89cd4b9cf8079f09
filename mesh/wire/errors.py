"""The error tree on the wire: a MeshError becomes a gRPC status with metadata, and back.

`_ERRORS` and `_REFUSALS` have a row for every error and every refusal reason, for HTTP as well:
`mesh.http` writes the status in the way of its protocols.

The status code is for clients that are not ours; ours read the class, the hint and the reason from
the trailing metadata, so that the command line raises what the controller raised.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import grpc

from mesh.domain.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineError,
    Forbidden,
    InvalidInput,
    MeshError,
    ModelError,
    NotFound,
    OutOfMemory,
    Refused,
    StorageError,
    Unauthenticated,
    Unavailable,
)
from mesh.domain.reasons import RefusalReason
from mesh.domain.values import dataclass


class Status(NamedTuple):
    """`openai` is the `code` of an error in OpenAI's protocol, where clients know it; a refusal's
    is else its reason.
    """

    grpc: grpc.StatusCode
    http: int
    openai: str


_Code = grpc.StatusCode
_ERRORS: tuple[tuple[type[MeshError], Status], ...] = (
    (InvalidInput, Status(_Code.INVALID_ARGUMENT, 400, "invalid_request")),
    (NotFound, Status(_Code.NOT_FOUND, 404, "model_not_found")),
    (AlreadyExists, Status(_Code.ALREADY_EXISTS, 409, "already_exists")),
    (Unauthenticated, Status(_Code.UNAUTHENTICATED, 401, "invalid_api_key")),
    (Forbidden, Status(_Code.PERMISSION_DENIED, 403, "permission_denied")),
    (DeadlineExceeded, Status(_Code.DEADLINE_EXCEEDED, 504, "deadline_exceeded")),
    (Cancelled, Status(_Code.CANCELLED, 499, "cancelled")),
    (Unavailable, Status(_Code.UNAVAILABLE, 503, "unavailable")),
    (StorageError, Status(_Code.FAILED_PRECONDITION, 500, "storage_error")),
    (ModelError, Status(_Code.FAILED_PRECONDITION, 500, "model_error")),
    (OutOfMemory, Status(_Code.RESOURCE_EXHAUSTED, 500, "out_of_memory")),
    (EngineError, Status(_Code.INTERNAL, 500, "engine_error")),
    (MeshError, Status(_Code.UNKNOWN, 500, "internal_error")),
)
"""The first that fits; a Refused goes by its reason."""
_REFUSALS: Mapping[RefusalReason, Status] = {
    RefusalReason.UNKNOWN_DEPLOYMENT: Status(_Code.NOT_FOUND, 404, "model_not_found"),
    RefusalReason.DEPLOYMENT_DELETED: Status(_Code.NOT_FOUND, 404, "model_not_found"),
    RefusalReason.PROMPT_TOO_LONG: Status(_Code.INVALID_ARGUMENT, 400, "context_length_exceeded"),
    RefusalReason.QUEUE_FULL: Status(_Code.RESOURCE_EXHAUSTED, 429, "queue_full"),
    RefusalReason.QUEUE_TIMEOUT: Status(_Code.RESOURCE_EXHAUSTED, 429, "queue_timeout"),
    RefusalReason.MEMORY_FULL: Status(_Code.RESOURCE_EXHAUSTED, 429, "memory_full"),
    RefusalReason.FIRST_TOKEN_LATE: Status(_Code.RESOURCE_EXHAUSTED, 429, "first_token_late"),
    RefusalReason.DELAYS_RUNNING: Status(_Code.RESOURCE_EXHAUSTED, 429, "delays_running"),
    RefusalReason.TPOT_EXCEEDED: Status(_Code.RESOURCE_EXHAUSTED, 429, "tpot_exceeded"),
    RefusalReason.TEXT_ON_HOLD: Status(_Code.RESOURCE_EXHAUSTED, 429, "text_on_hold"),
    RefusalReason.TENANT_LIMIT: Status(_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_exceeded"),
    RefusalReason.POLICY: Status(_Code.RESOURCE_EXHAUSTED, 429, "policy"),
    RefusalReason.NO_NODE: Status(_Code.UNAVAILABLE, 503, "no_node"),
    RefusalReason.NODE_LOST: Status(_Code.UNAVAILABLE, 503, "node_lost"),
    RefusalReason.SHUTTING_DOWN: Status(_Code.UNAVAILABLE, 503, "shutting_down"),
    RefusalReason.CELL_AWAY: Status(_Code.UNAVAILABLE, 503, "cell_away"),
    RefusalReason.LOAD_FAILED: Status(_Code.INTERNAL, 500, "load_failed"),
    RefusalReason.ENGINE_FAILED: Status(_Code.INTERNAL, 500, "engine_failed"),
}


_KINDS = {status.openai: kind for kind, status in _ERRORS}
_REASONS = {
    status.openai: reason for reason, status in _REFUSALS.items() if status.openai not in _KINDS
}


def error_coded(code: str, message: str, *, retry_after_s: float = 0.0) -> MeshError:
    """What a controller raised, by the code that OpenAI's protocol has for it."""
    if code in _REASONS:
        return Refused(message, reason=_REASONS[code], retry_after_s=retry_after_s)
    return _KINDS.get(code, MeshError)(message)


def status_for(error: MeshError) -> Status:
    if isinstance(error, Refused):
        return _REFUSALS[error.reason]
    return next(status for kind, status in _ERRORS if isinstance(error, kind))


ERROR_KEY = "mesh-error"
HINT_KEY = "mesh-hint-bin"
REASON_KEY = "mesh-reason"
RETRY_AFTER_KEY = "mesh-retry-after-s"
TEXT_BYTES_MAX = 1500
"""The longest message, and the longest hint: gRPC drops a call whose metadata comes to more than 8
KiB, and a message may take three bytes for one there.
"""

_FOREIGN: dict[grpc.StatusCode, type[MeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.OUT_OF_RANGE: InvalidInput,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unavailable,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireStatus:
    """How a call ends on the wire."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str | bytes], ...]


def status_of(error: MeshError) -> WireStatus:
    metadata: list[tuple[str, str | bytes]] = [(ERROR_KEY, type(error).__name__)]
    if error.hint:
        metadata.append((HINT_KEY, _clipped(error.hint).encode("utf-8")))
    if isinstance(error, Refused):
        metadata.append((REASON_KEY, error.reason.value))
        if error.retry_after_s > 0:
            metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"))
    return WireStatus(
        code=status_for(error).grpc, details=_clipped(error.message), metadata=tuple(metadata)
    )


class EndedCall(Protocol):
    """What gRPC raises when a call has failed, of either of its Python faces."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def is_told(call: EndedCall) -> bool:
    """Whether the other end said why, rather than gRPC."""
    return ERROR_KEY in dict(call.trailing_metadata() or ())


def error_of(call: EndedCall) -> MeshError:
    """What the other end raised; for a status that is not mesh's, the nearest kind."""
    code, said = call.code(), dict(call.trailing_metadata() or ())
    message = call.details() or f"the call ended with {code.name}"
    name = said.get(ERROR_KEY)
    if not isinstance(name, str):
        return _FOREIGN.get(code, MeshError)(message)
    hint = said.get(HINT_KEY, b"")
    return error_named(
        name,
        message,
        hint=hint.decode("utf-8", "replace") if isinstance(hint, bytes) else hint,
        reason=str(said.get(REASON_KEY, "")),
        retry_after_s=_seconds(said.get(RETRY_AFTER_KEY)),
    )


def error_named(
    name: str, message: str, *, hint: str = "", reason: str = "", retry_after_s: float = 0.0
) -> MeshError:
    """The error of a class given by its name; a MeshError for a name that is not in the tree."""
    kind = _CLASSES.get(name, MeshError)
    if not issubclass(kind, Refused):
        return kind(message, hint=hint)
    if reason not in set(RefusalReason):
        return MeshError(message, hint=hint)
    return kind(message, reason=RefusalReason(reason), retry_after_s=retry_after_s, hint=hint)


def _clipped(text: str) -> str:
    """One line of bounded length that UTF-8 can hold."""
    line = " ".join(text.split())
    raw = line.encode("utf-8", "replace")
    if len(raw) <= TEXT_BYTES_MAX:
        return raw.decode("utf-8")
    return raw[: TEXT_BYTES_MAX - 3].decode("utf-8", "ignore") + "…"


def _seconds(text: str | bytes | None) -> float:
    try:
        seconds = float(text or 0.0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _tree(kind: type[MeshError]) -> Iterator[type[MeshError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


_CLASSES = {kind.__name__: kind for kind in _tree(MeshError)}
