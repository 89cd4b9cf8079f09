"""Blocking gRPC calls of a client: failures told as errors of the tree, ends that are certain."""

from collections.abc import Iterator
from typing import TypeVar, cast

import grpc

from mesh.domain.errors import DeadlineExceeded, InvalidInput, MeshError, Unavailable
from mesh.wire.credentials import credentials
from mesh.wire.errors import EndedCall, error_of, is_told
from mesh.wire.handshake import why_refused

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

UNARY_S_MAX = 10.0
"""For a call that is answered from memory, unless its client is in a hurry."""


class Calls:
    """Calls to one controller, which the messages name by its address. `answer_s_max`: for a call
    that is answered from memory.
    """

    def __init__(self, address: str, answer_s_max: float = UNARY_S_MAX) -> None:
        self._address = address
        self._answer_s_max = answer_s_max

    def unary(self, call: "grpc.UnaryUnaryMultiCallable[Asked, Answer]", request: Asked) -> Answer:
        try:
            return call(request, timeout=self._answer_s_max)
        except grpc.RpcError as error:
            ended = cast(EndedCall, error)
            if ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(
                    f"the controller at {self._address} did not answer within "
                    f"{self._answer_s_max:g} s",
                    hint="see its log; is the machine overloaded?",
                ) from error
            raise self._error_of(ended, started=False) from error

    def stream(
        self, call: "grpc.CallIterator[Answer]", *, timeout_s: float | None = None
    ) -> Iterator[Answer]:
        """The call's messages; the call is cancelled when the iterator is left early."""
        started = False
        try:
            for message in call:
                started = True
                yield message
        except grpc.RpcError as error:
            ended = cast(EndedCall, error)
            if ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
                raise DeadlineExceeded(
                    f"not done within {timeout_s:g} s, the time limit of the call",
                    hint="allow more time, or ask for fewer tokens",
                ) from error
            raise self._error_of(ended, started=started) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def _error_of(self, ended: EndedCall, *, started: bool) -> MeshError:
        if is_told(ended):
            return error_of(ended)
        match ended.code():
            case grpc.StatusCode.UNAVAILABLE if started:
                return Unavailable(
                    f"the controller at {self._address} went away while it answered",
                    hint="run the command again; see the controller's log",
                )
            case grpc.StatusCode.UNAVAILABLE:
                return why_refused(self._address, credentials().tls) or Unavailable(
                    f"no controller answers at {self._address}",
                    hint="start one with `mesh up`, or name another with --controller HOST:PORT",
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return Unavailable(
                    f"what answers at {self._address} is no controller of this version of mesh",
                    hint="check the address and the versions at both ends",
                )
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return InvalidInput(f"the message is too large: {ended.details()}")
            case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
                return MeshError(
                    f"the controller at {self._address} failed: {ended.details()}",
                    hint="this is a fault of mesh; the controller's log has more",
                )
            case _:
                return error_of(ended)
