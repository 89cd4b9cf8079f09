"""Every failure has a status in each protocol, and the same meaning in both."""

import grpc
import pytest

from mesh.domain.errors import MeshError, Refused
from mesh.domain.reasons import RefusalReason
from mesh.wire.statuses import status_for
from tests.wire.test_errors import tree

ALIKE = {
    grpc.StatusCode.INVALID_ARGUMENT: {400},
    grpc.StatusCode.NOT_FOUND: {404},
    grpc.StatusCode.UNAUTHENTICATED: {401},
    grpc.StatusCode.PERMISSION_DENIED: {403},
    grpc.StatusCode.ALREADY_EXISTS: {409},
    grpc.StatusCode.RESOURCE_EXHAUSTED: {429, 500},
    grpc.StatusCode.UNAVAILABLE: {503},
    grpc.StatusCode.DEADLINE_EXCEEDED: {504},
    grpc.StatusCode.CANCELLED: {499},
    grpc.StatusCode.FAILED_PRECONDITION: {500},
    grpc.StatusCode.INTERNAL: {500},
    grpc.StatusCode.UNKNOWN: {500},
}
EVERY = [kind("x") for kind in tree() if kind is not Refused] + [
    Refused("x", reason=reason) for reason in RefusalReason
]


@pytest.mark.parametrize("error", EVERY, ids=repr)
def test_both_protocols_tell_the_same_kind_of_failure(error: MeshError) -> None:
    status = status_for(error)
    assert status.http in ALIKE[status.grpc]
    assert status.openai.isidentifier()


def test_clients_know_these_codes() -> None:
    codes = {reason: status_for(Refused("x", reason=reason)) for reason in RefusalReason}
    assert codes[RefusalReason.PROMPT_TOO_LONG][1:] == (400, "context_length_exceeded")
    assert codes[RefusalReason.UNKNOWN_DEPLOYMENT][1:] == (404, "model_not_found")
    assert codes[RefusalReason.QUEUE_FULL][1:] == (429, "queue_full")
