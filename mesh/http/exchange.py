"""One HTTP request: its body read within bounds, its client watched, its answer written.

Before: the server, by ASGI. After: an endpoint, which asks for the body and writes what comes.
An error before the answer has begun is a status; later it is an event, the last one.
"""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.domain.errors import DeadlineExceeded, InvalidInput, MeshError
from mesh.domain.ids import RequestId
from mesh.domain.invocation import Accepted
from mesh.http.refusals import (
    EVENT_STREAM,
    JSON,
    Failure,
    Header,
    dialect_of,
    encoded,
    error_event,
    error_headers,
    status_and_code,
)
from mesh.wire.access import caller
from mesh.wire.own_slo import CLASS_HEADER
from mesh.wire.work_threads import Shares

BODY_BYTES_MAX = 8 << 20
"""The longest contexts, as text."""
IN_HAND_BYTES_MAX = 256 << 20
"""All bodies that are being read may take this much together."""
IN_HAND_MAX = 4096
"""So many may be read at a time: half of the connections. A tenant's share of the bytes is eight of
the longest bodies.
"""
UNREAD_BYTES_MAX = 32 << 20
"""This much of a body that is too long is read and dropped before the answer: clients that read
only after they have sent everything would lose it otherwise. A body that declares more is refused
unread."""
BODY_S_MAX = 60.0
_SHOWN_BYTES = 100
END_S_MAX = 1.0
"""For telling a client how its stream ends; one that does not even read that is cut off."""
GRACE_HEADER = b"x-slo-grace-ms"
"""By how much the first token may be late for the sake of a load; absent: it is in time."""
ABORT = "mesh.abort"
"""Extension of our server: ends the connection, and forgets what its client has not read."""
WATCH = "mesh.watch"
"""Extension of our server: calls what it is given as soon as the client has left."""
PLACED = "mesh.placed"
"""Extension of batches: it is called as soon as a call has a place."""
_STREAM: tuple[Header, ...] = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
Failing = Callable[[Failure, bytes], bytes]
"""The end of a stream that fails, from the failure and the body that would tell of it at first."""

logger = logging.getLogger(__name__)


class Bodies:
    """Bodies that are being read, of all exchanges of a server, and their bytes. A tenant has at
    most a share of them, since a body may take its time.
    """

    def __init__(self, bytes_max: int = IN_HAND_BYTES_MAX, count_max: int = IN_HAND_MAX) -> None:
        self._bytes = Shares("bytes of bodies are being read", bytes_max)
        self._counts = Shares("bodies are being read", count_max)

    @contextmanager
    def reading(self, of: str | None = None) -> Iterator["BodyInHand"]:
        """One more body, in hand until the block is left, in the share of the caller's tenant or
        of whom `of` names. Raises Refused where there are too many.
        """
        tenant = caller().tenant if of is None else of
        self._counts.move(1, tenant)
        body = BodyInHand(self._bytes, tenant)
        try:
            yield body
        finally:
            body.drop()
            self._counts.move(-1, tenant)


class BodyInHand:
    """The parts of a body that have come."""

    def __init__(self, in_hand: Shares, tenant: str) -> None:
        self._in_hand = in_hand
        self._tenant = tenant
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """Raises Refused."""
        self._in_hand.move(len(part), self._tenant)
        self._parts.append(part)

    def drop(self) -> None:
        self._in_hand.move(-sum(map(len, self._parts)), self._tenant)
        self._parts.clear()

    def whole(self) -> bytes:
        return b"".join(self._parts)


class Exchange:
    """What an endpoint does with its request: `answering` around all of it, `watched` around what
    waits for the gateway.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._dialect = dialect_of(scope["path"])
        self._receive = receive
        self._send = send
        self._left = False
        self._ended = False
        self._unread = True
        """More of the body may come."""
        self._status: tuple[int, str] | None = None
        """The status of an error that HTTP knows more exactly than the error tree does."""
        self.begun = False
        """Its status is written."""
        self._request_ids: list[RequestId] = []
        """As soon as they are known."""
        self.context_tokens: int | None = None
        """The context limit of the deployment that is asked, once it is known."""
        self.slo_class = ""
        """That of its first request, once it has a place."""
        self._grace_s = 0.0
        self._failing: Failing = error_event

    def headers(self) -> Iterable[Header]:
        """All of them, their names in lower case."""
        found: Iterable[Header] = self._scope["headers"]
        return found

    def header(self, name: bytes) -> bytes | None:
        """The last of this name, in lower case."""
        return dict(self.headers()).get(name)

    def named(self, request_id: RequestId) -> None:
        """One of its requests has been asked."""
        self._request_ids.append(request_id)

    @property
    def request_id(self) -> str:
        """The id of the call's first request; empty before there is one."""
        return self._request_ids[0] if self._request_ids else ""

    def accepted(self, accepted: Accepted) -> None:
        """Notes the grace of an accepted request: of several requests, the latest first token is
        told.
        """
        self._grace_s = max(self._grace_s, accepted.grace_s)
        self.slo_class = self.slo_class or accepted.slo_class
        if PLACED in self._scope["extensions"]:
            self._scope["extensions"][PLACED]()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Within it an error of the tree, or any other, becomes the answer."""
        try:
            yield
        except MeshError as error:
            await self._fail(error, *(self._status or status_and_code(error)))
        except Exception as error:
            logger.exception("a call failed")
            fault = MeshError(f"unexpected {type(error).__name__}: {error}")
            await self._fail(fault, *status_and_code(fault))

    @asynccontextmanager
    async def body(
        self, bodies: Bodies, within_s: float | None = None, of: str | None = None
    ) -> AsyncIterator[bytes]:
        """In hand until the block is left, one of `bodies` in the share of `of`
        (`Bodies.reading`). Raises InvalidInput where it is too long or not said to be JSON,
        DeadlineExceeded where it takes more than `within_s` or BODY_S_MAX seconds, or Refused
        where too many are being read.
        """
        with bodies.reading(of) as in_hand:
            yield await self._read(in_hand, BODY_S_MAX if within_s is None else within_s)

    async def _read(self, in_hand: BodyInHand, within_s: float) -> bytes:
        try:
            async with asyncio.timeout(within_s):
                body = await self._whole_body(in_hand)
        except TimeoutError:
            self._status = 408, "request_timeout"
            raise DeadlineExceeded(f"the body has not come within {within_s:g} s") from None
        kind = self.header(b"content-type") or b""
        if kind.split(b";")[0].strip().lower() != b"application/json":
            # Pages of other sites could send it without being asked whether they may.
            self._status = 415, "unsupported_media_type"
            raise InvalidInput(
                "the body's content type is no application/json",
                hint="send the header Content-Type: application/json",
            )
        encoding = (self.header(b"content-encoding") or b"identity").strip().lower()
        if encoding != b"identity":
            self._status = 415, "unsupported_media_type"
            raise InvalidInput(
                f"the body is encoded as {encoding[:_SHOWN_BYTES].decode('latin-1')!r}, and no "
                "encoding is read here",
                hint="send the body as it is, without the header Content-Encoding",
            )
        return body

    async def _whole_body(self, in_hand: BodyInHand) -> bytes:
        declared_bytes = int(self.header(b"content-length") or 0)
        if declared_bytes > UNREAD_BYTES_MAX:
            raise self._too_long(f"{declared_bytes} bytes")
        came_bytes = 0
        while self._unread and came_bytes <= UNREAD_BYTES_MAX:
            part = await self._part()
            came_bytes += len(part)
            if came_bytes <= BODY_BYTES_MAX:
                in_hand.add(part)
            else:
                in_hand.drop()
        if came_bytes > BODY_BYTES_MAX:
            raise self._too_long(f"{'at least ' if self._unread else ''}{came_bytes} bytes")
        return in_hand.whole()

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._left = True
            raise InvalidInput("the client has left")
        self._unread = message["more_body"]
        part: bytes = message["body"]
        return part

    def parts(self, bytes_max: int) -> AsyncGenerator[bytes, None]:
        """A body of `multipart/form-data` as it comes. Raises InvalidInput where it is none, or too
        long, which may turn out later.
        """
        kind = self.header(b"content-type") or b""
        if kind.split(b";")[0].strip().lower() != b"multipart/form-data":
            self._status = 415, "unsupported_media_type"
            raise InvalidInput(
                "the body's content type is no multipart/form-data",
                hint="send a form with purpose and file, as `curl -F` does",
            )
        came_bytes = int(self.header(b"content-length") or 0)
        if came_bytes > bytes_max:
            raise self._too_long(f"{came_bytes} bytes", bytes_max, "send several files")
        return self._parts(bytes_max)

    async def _parts(self, bytes_max: int) -> AsyncGenerator[bytes, None]:
        came_bytes = 0
        while self._unread:
            part = await self._part()
            came_bytes += len(part)
            if came_bytes > bytes_max:
                raise self._too_long(
                    f"more than {bytes_max} bytes", bytes_max, "send several files"
                )
            yield part

    def _too_long(
        self, size: str, bytes_max: int = BODY_BYTES_MAX, hint: str = "shorten the prompt"
    ) -> InvalidInput:
        self._status = 413, "request_too_large"
        return InvalidInput(f"the body has {size}; {bytes_max} is the limit", hint=hint)

    def watched(self, leave: Callable[[RequestId], None]) -> AbstractContextManager[None]:
        """As `until_left`: as soon as its client leaves, its requests do, but not once it has all
        of its answer.
        """

        def leaves() -> bool:
            if not self._ended:
                self._left = True
                for request_id in self._request_ids:
                    leave(request_id)
            return self._left

        return until_left(self._scope, leaves)

    async def stream(
        self,
        first: bytes,
        *,
        kind: str = EVENT_STREAM,
        failing: Failing = error_event,
    ) -> None:
        """Begin to answer by a stream of content type `kind`; `failing` says how it ends when it
        fails.
        """
        self._failing = failing
        content_type = (b"content-type", kind.encode())
        await self._begin(200, (content_type, *_STREAM, *self._told_headers()))
        await self.write(first)

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes = b"") -> None:
        self._ended = True
        await self._send({"type": "http.response.body", "body": chunk})

    async def json(self, *pieces: bytes) -> None:
        """Other calls get on between the pieces."""
        *most, last = pieces
        length = (b"content-length", b"%d" % sum(map(len, pieces)))
        await self._begin(200, (JSON, length, *self._told_headers()))
        for piece in most:
            await self.write(piece)
            await asyncio.sleep(0)
        await self.end(last)

    async def _fail(self, error: MeshError, status: int, code: str) -> None:
        if self._left:
            return
        of_class = isinstance(error, InvalidInput) and error.field == "slo_class"
        if of_class and self.header(CLASS_HEADER.encode()) is not None:
            error = InvalidInput(error.message, hint=error.hint, field=CLASS_HEADER)
        failure = Failure(
            error=error,
            status=status,
            code=code,
            context_tokens=self.context_tokens,
            request_id=self.request_id,
        )
        status, body = self._dialect.refusal(failure)
        told = encoded(body)
        try:
            async with asyncio.timeout(END_S_MAX):
                if self.begun:
                    await self.end(self._failing(failure, told))
                else:
                    closing = ((b"connection", b"close"),) if self._unread else ()
                    headers = (*self._id_header(), *error_headers(error), *closing)
                    await self._whole(status, headers, told)
        except TimeoutError:
            await self.cut_off()

    async def cut_off(self) -> None:
        """Leave a client that does not read what it is told."""
        self._scope["extensions"][ABORT]()
        await asyncio.sleep(0)  # so that the server knows before we leave

    async def respond(self, response: Response) -> None:
        """Answer by a whole response."""
        await response(self._scope, self._receive, self._send)

    async def _whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self._begin(status, (JSON, length, *headers))
        await self.end(body)

    async def _begin(self, status: int, headers: Iterable[Header]) -> None:
        self.begun = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    def _told_headers(self) -> tuple[Header, ...]:
        grace = ((GRACE_HEADER, b"%d" % math.ceil(1000 * self._grace_s)),) if self._grace_s else ()
        return (*self._id_header(), *grace)

    def _id_header(self) -> tuple[Header, ...]:
        names = self._dialect.id_headers if self.request_id else ()
        return tuple((name, self.request_id.encode()) for name in names)


class Endpoint(ABC):
    """An ASGI application. What it raises becomes its answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        async with exchange.answering():
            await self.answer(exchange, Request(scope))

    @abstractmethod
    async def answer(self, exchange: Exchange, request: Request) -> None: ...


@contextmanager
def until_left(scope: Scope, leaves: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """As soon as the client leaves, the task is cancelled, unless `leaves` says that there is
    nothing to give up; the block is then left in silence.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal left
        left = leaves()
        if left:
            task.cancel()

    unwatch = scope["extensions"][WATCH](leave)
    try:
        yield
    except asyncio.CancelledError:
        if not left or task.uncancel():
            raise
    finally:
        unwatch()


class Apart(ABC):
    """A call that is not answered by the events of its request."""

    of_any_task: ClassVar[bool] = False
    """Whether a deployment of any task may be named."""

    @abstractmethod
    async def answer(
        self, exchange: Exchange, reads: Callable[[Any], ASGIApp], scope: Scope, raw: bytes
    ) -> None:
        """Tell its client. `reads` makes the endpoint that reads bodies in another way."""
