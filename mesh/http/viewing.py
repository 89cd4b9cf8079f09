"""`/api/v1/cell` and `/api/v1/events`: the cell whole, and as a stream of what changes in it.

Before: the routes. After: the feed, which makes each of its events once for all viewers.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.routing import Route

from mesh.http.exchange import Endpoint, Exchange
from mesh.http.feed import Feed
from mesh.wire.access import caller

WRITE_S_MAX = 20.0
"""A viewer that does not read one piece within this time is cut off: it cannot be told."""
Check = Callable[[Request], object]
"""Raises Unauthenticated or Forbidden for who may not view any more."""
LAST_ID = "last-event-id"


class InPieces(Endpoint):
    """The JSON that `make` gives, a piece in a turn of the loop."""

    def __init__(self, make: Callable[[Request], Awaitable[list[bytes]]]) -> None:
        self._make = make

    async def answer(self, exchange: Exchange, request: Request) -> None:
        made = await self._make(request)
        try:
            async with asyncio.timeout(WRITE_S_MAX):
                await exchange.json(*made)
        except TimeoutError:
            await exchange.cut_off()


def cell_route(feed: Feed) -> Route:
    """The state, whole."""
    return Route("/api/v1/cell", InPieces(lambda _: feed.cell(caller())), methods=["GET"])


class CellEvents(Endpoint):
    """The events, until the viewer leaves, or its key opens nothing more."""

    def __init__(self, feed: Feed, check: Check) -> None:
        self._feed = feed
        self._check = check

    async def answer(self, exchange: Exchange, request: Request) -> None:
        last_id = request.headers.get(LAST_ID, "")
        if request.method == "HEAD":
            await exchange.stream(b"")
            await exchange.end()
            return
        with exchange.watched(lambda _: None):
            async with aclosing(self._feed.events(caller(), last_id)) as events:
                try:
                    async for blocks in events:
                        self._check(request)
                        for block in blocks:
                            write = exchange.write if exchange.begun else exchange.stream
                            async with asyncio.timeout(WRITE_S_MAX):
                                await write(block)
                            await asyncio.sleep(0)
                    async with asyncio.timeout(WRITE_S_MAX):
                        await exchange.end()
                except TimeoutError:
                    await exchange.cut_off()
