"""The HTTP server: uvicorn with httptools in the controller's own loop, within bounds of its own.

It owns the socket and the connections from `start` to `stop`. uvicorn bounds neither a request's
head nor the time in which it comes, so the protocol does; nor the connections that rest, so
`connections` does.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mesh.domain.errors import InvalidInput
from mesh.http.connections import CONNECTIONS_MAX, TAKEN_IN_A_ROW_MAX, Connections, Listening
from mesh.http.exchange import ABORT, WATCH
from mesh.http.refusals import Failure, encoded, in_openai
from mesh.wire.channel import format_address, listening_socket, parse_address
from mesh.wire.credentials import Tls

HEAD_BYTES_MAX = 64 << 10
HEAD_S_MAX = 10.0
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: they close them, and none is reused as it closes."""
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class HttpServer:
    """Listens from its construction on, with a certificate where there is one. Raises InvalidInput,
    or Unavailable for a port in use. `book`: with bounds of its own.
    """

    def __init__(
        self, listen: str, tls: Tls | None = None, *, book: Connections | None = None
    ) -> None:
        host, _ = parse_address(listen)
        self._book = Connections(secured=tls is not None) if book is None else book
        self._socket = Listening(listening_socket(listen, option="--http"), self._book)
        self.address = format_address(host, self._socket.getsockname()[1])
        self._tls = tls
        self._app: ASGIApp
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        """Serve, until `stop`; where it serves already, this answers from now on."""
        self._app = app
        if self._server is not None:
            return
        tls = self._tls
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",  # of a bound method uvicorn would take it for ASGI 2
            http=partial(BoundedProtocol, book=self._book),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            backlog=TAKEN_IN_A_ROW_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=tls.folder / f"{tls.part}.pem" if tls else None,
            ssl_keyfile=tls.folder / f"{tls.part}.key" if tls else None,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def stop(self, drain_s_max: float) -> None:
        """Take no more connections; end when those that there are have been answered, or then."""
        if self._server is not None and self._serving is not None:
            self._server.config.timeout_graceful_shutdown = drain_s_max  # type: ignore[assignment]
            self._server.should_exit = True
            await self._serving

    def close(self) -> None:
        """The socket, if it never came to serving."""
        self._socket.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The controller's are enough."""
        yield


class BoundedProtocol(HttpToolsProtocol):
    """A head that is too long or too slow ends the connection; so may an endpoint, which may have
    itself told at once when the client ends it: by `receive` it would wait behind the tasks of all
    others who leave.
    """

    def __init__(self, *args: Any, book: Connections | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._book = Connections() if book is None else book
        self._number = -1
        """Its file descriptor, by which the book knows it."""
        self._head_bytes = 0
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None
        self._lost = False
        self._left: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        taken = transport.get_extra_info("socket")
        self._number = -1 if taken is None else taken.fileno()
        self._book.made(self._number)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._lost = True
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions = {ABORT: self.transport.abort, WATCH: self._watch}
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        self._expect_head()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_read_again` has the request read as one that offers none
        self._head_came()
        self._book.works(self._number)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = _until_closed(self.cycle)  # type: ignore[assignment, method-assign]

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no request that came meanwhile is being answered
            self._book.rests(self._number)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while rest:
                rest = self._feed(rest)
        except httptools.HttpParserError as error:
            self._refuse(400, f"the request is no valid HTTP/1.1: {error}")
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(431, f"the headers have more than {HEAD_BYTES_MAX} bytes")

    def _feed(self, data: memoryview) -> memoryview:
        """Read data. What it returns comes after the head of a request that offers an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_again()
            return data[upgrade.args[0] :]
        return data[:0]

    def _read_again(self) -> None:
        """Have the head that has just come read without its offer of an upgrade. The parser would
        take whatever follows for the other protocol, and this server takes no offer (RFC 9110,
        section 7.8): clients of Java and `curl --http2` send a body with one.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "CONNECT: this server opens no tunnels")
            return
        version = self.parser.get_http_version().encode()
        head = [method, b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += name, b": ", value, b"\r\n"
        # The old parser takes nothing more where the connection is to be closed.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"".join([*head, b"\r\n"]))

    def _watch(self, left: Callable[[], None]) -> Callable[[], None]:
        """What it yields ends it: the next request on the connection may have begun by then. Nobody
        sees a client leave where reading rests, as it does behind a long body.
        """
        self._left = left
        if self._lost:
            left()
        else:
            self.flow.resume_reading()

        def unwatch() -> None:
            if self._left is left:
                self._left = None

        return unwatch

    def _expect_head(self) -> None:
        self._head_came()
        self._in_head, self._head_bytes = True, 0
        self._late = self.loop.call_later(HEAD_S_MAX, self._refuse_late)

    def _head_came(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse_late(self) -> None:
        if not self._head_bytes:
            self.transport.close()
        self._refuse(408, f"the headers have not come within {HEAD_S_MAX:g} s")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        self._head_came()
        error = InvalidInput(message)
        _, told = in_openai(Failure(error=error, status=status, code="invalid_request"))
        body = encoded(told)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, _REASONS[status], len(body), body)
        )
        self.transport.close()


def _until_closed(cycle: RequestResponseCycle) -> Send:
    """Write an answer to a request of HTTP/1.0, which knows no chunks: without a length, its end is
    the connection's.
    """
    send = cycle.send
    unsized = False

    async def send_unchunked(message: Message) -> None:
        nonlocal unsized
        if message["type"] == "http.response.start":
            unsized = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unsized:
                cycle.chunked_encoding = False
        elif unsized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return send_unchunked
