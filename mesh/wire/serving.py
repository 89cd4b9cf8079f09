"""What every call of mesh's own services goes through on the server: an interceptor.

A handler raises an error of the tree, and the caller receives it with its hint and reason; bytes
that are no message are answered as InvalidInput; anything else that a handler raises is a fault of
ours, logged with its trace and told as such.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from mesh.domain.access import Role
from mesh.domain.errors import InvalidInput, MeshError
from mesh.wire.access import AUTHORIZATION, FOR, NODE_LINK, RPCS, Gate, act_for, caller
from mesh.wire.errors import status_of
from mesh.wire.malformed import Malformed, lenient

logger = logging.getLogger(__name__)

_OURS = ("/mesh.v1.", "/inference.")
_HEALTH = "/grpc.health.v1.Health/Check"
_COMMON_NAME = "x509_common_name"
"""The name, in gRPC's context, of the common name in the certificate that the caller showed."""
ABORT_S_MAX = 1.0
"""For telling a caller why its call ends; one that does not even read that is dropped."""

# grpc's handlers are untyped: what they take and give differs with the method.
Handler = Callable[[Any, Any], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of mesh.v1 and of the Open Inference Protocol; reflection is left as it
    is. Where keys are wanted, calls that need none are answered without their messages.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate or Gate()
        self.instead: Callable[[bool], MeshError] | None = None
        """What every call of ours is answered with, where this controller does not lead; it is told
        whether the gate knows the caller.
        """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        if self.instead is not None and details.method.startswith(_OURS):
            known = self._gate.knows(_shown_in(details.invocation_metadata))
            return _unread(self.instead(known), None)
        handler = await continuation(details)
        gate, roles = self._gate, RPCS.get(details.method, frozenset({Role.ADMIN}))
        if handler is None:
            return None
        if gate.wants_keys and (roles is None or details.method == _HEALTH):
            return _unasked(handler)
        if not details.method.startswith(_OURS):
            return handler
        parse = lenient(handler.request_deserializer)
        try:
            if roles is not None:
                gate.check(_shown_in(details.invocation_metadata), roles)
        except MeshError as error:
            return _unread(error, handler.response_serializer)

        def guarded(of: Handler) -> Handler:
            return answered(admitted(of, details.method, gate, roles))

        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                guarded(handler.stream_stream), parse, handler.response_serializer
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                guarded(handler.unary_stream), parse, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            guarded(handler.unary_unary), parse, handler.response_serializer
        )


def admitted(handler: Handler, method: str, gate: Gate, roles: frozenset[Role] | None) -> Handler:
    """The handler, for those who have a key of these roles, and the certificate for it; None: for
    anyone. It runs for whom an operator names.
    """
    if roles is None:
        return handler

    async def call(request: Any, context: Any) -> Any:
        metadata = context.invocation_metadata()
        if gate.looks:
            gate.check_certificate(method, context.auth_context().get(_COMMON_NAME, ()))
            gate.admit(_shown_in(metadata), roles)
        said = dict(metadata or ()).get(FOR)
        if isinstance(said, str):
            act_for(said)
            gate.check_acted_for(caller().key_id)
        return await handler(request, context)

    return call


def may_join(gate: Gate, context: Any) -> bool:
    """Whether the caller shows what a node must show to join: the key of one, or an operator's, and
    the certificate.
    """
    try:
        gate.check_certificate(NODE_LINK, context.auth_context().get(_COMMON_NAME, ()))
        gate.check(_shown_in(context.invocation_metadata()), RPCS[NODE_LINK] or ())
    except MeshError:
        return False
    return True


def _shown_in(metadata: Any) -> str | None:
    """What the caller of these metadata shows."""
    said = dict(metadata or ()).get(AUTHORIZATION)
    return said if isinstance(said, str) else None


def _unread(error: MeshError, serializer: Any) -> Any:
    """A handler that ends the call with this error. It takes a stream of requests, whatever the
    method takes, so that gRPC reads no message, which may be long, before the call has ended.
    """

    async def refuse(requests: Any, context: Any) -> None:
        await end(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse, None, serializer)


def _unasked(handler: Any) -> Any:
    """The handler of a call with one message and one answer, which answers as it does to an empty
    message: gRPC reads none, which may be long and from anybody.
    """

    async def answer(requests: Any, context: Any) -> None:
        await context.write(
            await answered(handler.unary_unary)(handler.request_deserializer(b""), context)
        )

    return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)


def answered(handler: Handler) -> Handler:
    """The handler, its errors turned into the call's status."""

    async def call(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, Malformed):
                raise InvalidInput(request.message)
            return await handler(request, context)
        except MeshError as error:
            await end(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            if context.done():
                # The caller left while something was being written to it.
                raise asyncio.CancelledError from error
            logger.exception("a call failed")
            await end(context, MeshError(f"unexpected {type(error).__name__}: {error}"))

    return call


async def end(context: Any, error: MeshError) -> NoReturn:
    """End the call with this error, within ABORT_S_MAX even if the caller reads nothing."""
    status = status_of(error)
    with suppress(TimeoutError):
        async with asyncio.timeout(ABORT_S_MAX):
            await context.abort(status.code, status.details, status.metadata)
    # The status is with gRPC, which delivers it should the caller ever read again.
    raise asyncio.CancelledError
