"""How a call ends in each protocol: a row for every error of the tree and every refusal reason.

Before: whatever raises an error of the tree. After: `errors` and `mesh.http`, which write the
status with its message, hint and reason in the way of their protocol.
"""

from collections.abc import Mapping
from typing import NamedTuple

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
