"""The page over a journal: the same files, feed and readings as a live cell's, and
`/api/v1/journal`, by which one moves in it.

It plays by itself where it is asked to. Before: `mesh page --journal`. After: the view of a
journal.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.domain.access import ANYONE
from mesh.domain.errors import InvalidInput
from mesh.http.app import ABOUT, assembled
from mesh.http.bodies import read
from mesh.http.exchange import Bodies, Endpoint, Exchange
from mesh.http.feed import Feed
from mesh.http.page import Page
from mesh.http.reading import Reads, reading
from mesh.http.refusals import encoded, json_response
from mesh.http.sessions import Sessions, check_origin
from mesh.http.tools import Strict
from mesh.http.viewing import CellEvents, cell_route
from mesh.report.plain import Plain, plain_fields
from mesh.wire.access import Gate

PLAY_TICK_S = 0.5
SPEED_MAX = 1_000.0
INDEX_MAX = 2**53


class Journalled(Protocol):
    """What is moved in."""

    @property
    def position(self) -> object: ...

    async def seek(self, index: int) -> None: ...

    async def advance(self, seconds: float) -> None: ...


class _Move(Strict):
    index: int | None = Field(default=None, ge=0, le=INDEX_MAX)
    speed: float | None = Field(default=None, ge=0, le=SPEED_MAX)
    """So many of the journal's seconds pass in one; 0 stops."""


class Moving(Endpoint):
    """GET says where one stands, POST moves, or plays."""

    def __init__(self, journal: Journalled, feed: Feed, bodies: Bodies) -> None:
        self._journal = journal
        self._feed = feed
        self._bodies = bodies
        self._speed = 0.0
        self._trouble = ""
        self._playing: asyncio.Task[None] | None = None

    async def answer(self, exchange: Exchange, request: Request) -> None:
        if request.method == "POST":
            check_origin(request)
            async with exchange.body(self._bodies) as raw:
                asked = read(_Move, raw)
            await self._move(asked)
        await exchange.json(encoded(self._state()))

    def _state(self) -> dict[str, Plain]:
        where = plain_fields(self._journal.position)
        return {**where, "speed": self._speed, "trouble": self._trouble}

    async def _move(self, asked: _Move) -> None:
        if asked.index is not None:
            self._speed, self._trouble = 0.0, ""
            await self._moved(self._journal.seek(asked.index))
        if asked.speed is not None:
            self._speed = asked.speed
            if self._speed and (self._playing is None or self._playing.done()):
                self._playing = asyncio.create_task(self._play())

    async def _moved(self, move: Awaitable[None]) -> None:
        """As far as the journal can be read. What is wrong with it is told until the next move."""
        try:
            await move
        except InvalidInput as error:
            self._speed, self._trouble = 0.0, error.message
        await self._feed.again()

    async def _play(self) -> None:
        with suppress(asyncio.CancelledError):
            while self._speed:
                await asyncio.sleep(PLAY_TICK_S)
                where = plain_fields(self._journal.position)
                if where["index"] == where["events"]:
                    self._speed = 0.0
                    return
                await self._moved(self._journal.advance(PLAY_TICK_S * self._speed))


def journal_application(journal: Journalled, feed: Feed, reads: Callable[[], Reads]) -> Starlette:
    """`reads` gives what is read at the present place."""
    moving = Route("/api/v1/journal", Moving(journal, feed, Bodies()), methods=["GET", "POST"])
    routes = [moving, *view_only(feed, reads, journal=True)]
    return assembled(routes, Gate(), Sessions(time.monotonic))


def view_only(feed: Feed, reads: Callable[[], Reads], *, journal: bool) -> list[Route]:
    """The page, and what it reads of a cell in which nothing can be done. With `journal` the page
    shows what moves through a journal.
    """
    pages = Page(encoded(ABOUT), shown=True, opened=lambda _: feed.expect(ANYONE))
    whose = {"wants_keys": False, "role": "admin", "tenant": "", "csrf": "", "journal": journal}

    async def session(request: Request) -> Response:
        return json_response(whose)

    return [
        Route("/", pages.root),
        Route("/page/{file:path}", pages.file),
        Route("/api/v1/session", session, methods=["GET"]),
        cell_route(feed),
        Route("/api/v1/events", CellEvents(feed, lambda _: None), methods=["GET"]),
        *reading(reads),
    ]
