"""Ends a connection whose request was answered before its body had come, without reading it all.

A refusal that needs the headers alone, as for want of a key, is written at once; what still comes
is let go by for a moment, within a bound, so that a client which is writing can read the answer,
and then the connection is closed. Outermost: before the keys and all routes.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_BYTES_MAX = 1 << 20
LINGER_S_MAX = 0.5


class Lingering:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        unread = True

        async def reading() -> Message:
            nonlocal unread
            message = await receive()
            unread = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def answering(message: Message) -> None:
            if not unread:
                await send(message)
            elif message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"connection"]
                await send({**message, "headers": [*headers, (b"connection", b"close")]})
            elif message.get("more_body", False):
                await send(message)
            else:
                await send({**message, "more_body": True})
                await _let_go_by(receive)
                await send({"type": "http.response.body", "body": b""})

        await self._app(scope, reading, answering)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


async def _let_go_by(receive: Receive) -> None:
    gone_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S_MAX):
            while gone_bytes <= LINGER_BYTES_MAX:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                gone_bytes += len(message.get("body", b""))
