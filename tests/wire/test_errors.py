"""The error tree survives the wire, and has the same meaning in each protocol."""

from dataclasses import dataclass

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    InvalidInput,
    MeshError,
    ModelError,
    NotFound,
    OutOfMemory,
    Refused,
    TornModel,
    Unavailable,
    UnsupportedModel,
)
from mesh.domain.reasons import RefusalReason, hint_for
from mesh.wire.errors import (
    HINT_KEY,
    TEXT_BYTES_MAX,
    WireStatus,
    error_named,
    error_of,
    status_for,
    status_of,
)

CODE = grpc.StatusCode


@dataclass
class Ended:
    """A failed call as the other end sees it."""

    status: WireStatus

    def code(self) -> grpc.StatusCode:
        return self.status.code

    def details(self) -> str:
        return self.status.details

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.status.metadata


def tree(kind: type[MeshError] = MeshError) -> list[type[MeshError]]:
    return [kind, *(below for sub in kind.__subclasses__() for below in tree(sub))]


@pytest.mark.parametrize("kind", [kind for kind in tree() if kind is not Refused])
def test_every_class_comes_back_with_message_and_hint(kind: type[MeshError]) -> None:
    back = error_of(Ended(status_of(kind("no «é» here", hint="try ü"))))
    assert (type(back), back.message, back.hint) == (kind, "no «é» here", "try ü")


@pytest.mark.parametrize("reason", RefusalReason)
def test_a_refusal_comes_back_with_its_reason(reason: RefusalReason) -> None:
    refused = Refused("full", reason=reason, retry_after_s=1.5, hint="later")
    back = error_of(Ended(status_of(refused)))
    assert isinstance(back, Refused)
    assert (back.reason, back.retry_after_s, back.hint) == (reason, 1.5, "later")


@pytest.mark.parametrize("reason", RefusalReason)
def test_a_refusal_tells_other_clients_what_helps_against_its_reason(reason: RefusalReason) -> None:
    said = dict(status_of(Refused("full", reason=reason, retry_after_s=1.5)).metadata)
    assert said[HINT_KEY] == hint_for(reason, 1.5).encode()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("x"), CODE.INVALID_ARGUMENT),
        (NotFound("x"), CODE.NOT_FOUND),
        (Unavailable("x"), CODE.UNAVAILABLE),
        (Cancelled("x"), CODE.CANCELLED),
        (DeadlineExceeded("x"), CODE.DEADLINE_EXCEEDED),
        (ModelError("x"), CODE.FAILED_PRECONDITION),
        (TornModel("x"), CODE.FAILED_PRECONDITION),
        (UnsupportedModel("x"), CODE.FAILED_PRECONDITION),
        (EngineError("x"), CODE.INTERNAL),
        (OutOfMemory("x"), CODE.RESOURCE_EXHAUSTED),
        (Refused("x", reason=RefusalReason.QUEUE_FULL), CODE.RESOURCE_EXHAUSTED),
        (Refused("x", reason=RefusalReason.FIRST_TOKEN_LATE), CODE.RESOURCE_EXHAUSTED),
        (Refused("x", reason=RefusalReason.DELAYS_RUNNING), CODE.RESOURCE_EXHAUSTED),
        (Refused("x", reason=RefusalReason.TPOT_EXCEEDED), CODE.RESOURCE_EXHAUSTED),
        (Refused("x", reason=RefusalReason.PROMPT_TOO_LONG), CODE.INVALID_ARGUMENT),
        (Refused("x", reason=RefusalReason.UNKNOWN_DEPLOYMENT), CODE.NOT_FOUND),
        (Refused("x", reason=RefusalReason.NO_NODE), CODE.UNAVAILABLE),
        (Refused("x", reason=RefusalReason.LOAD_FAILED), CODE.INTERNAL),
    ],
)
def test_other_clients_get_the_nearest_status_code(error: MeshError, code: grpc.StatusCode) -> None:
    assert status_of(error).code is code


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=50), st.integers(1, 200))
def test_what_goes_on_the_wire_is_one_bounded_line_of_utf_8(text: str, times: int) -> None:
    """gRPC drops a call with more than 8 KiB of metadata; a lone surrogate is no UTF-8."""
    status = status_of(Unavailable(text * times, hint=text * times))
    assert len(status.details.encode("utf-8")) <= TEXT_BYTES_MAX
    assert len(status.details.splitlines()) <= 1
    for key, value in status.metadata:
        assert key.endswith("-bin") == isinstance(value, bytes)
        assert len(value) <= TEXT_BYTES_MAX


def test_a_status_that_is_not_ours_becomes_the_nearest_kind() -> None:
    for code, kind in ((CODE.NOT_FOUND, NotFound), (CODE.DEADLINE_EXCEEDED, DeadlineExceeded)):
        assert type(error_of(Ended(WireStatus(code=code, details="", metadata=())))) is kind


def test_names_that_are_not_in_the_tree_do_no_harm() -> None:
    assert type(error_named("SystemExit", "x")) is MeshError
    assert type(error_named("Refused", "x", reason="bored")) is MeshError


ALIKE = {
    CODE.INVALID_ARGUMENT: {400},
    CODE.NOT_FOUND: {404},
    CODE.UNAUTHENTICATED: {401},
    CODE.PERMISSION_DENIED: {403},
    CODE.ALREADY_EXISTS: {409},
    CODE.RESOURCE_EXHAUSTED: {429, 500},
    CODE.UNAVAILABLE: {503},
    CODE.DEADLINE_EXCEEDED: {504},
    CODE.CANCELLED: {499},
    CODE.FAILED_PRECONDITION: {500},
    CODE.INTERNAL: {500},
    CODE.UNKNOWN: {500},
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
