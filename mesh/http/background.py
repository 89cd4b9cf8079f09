"""Responses that are made in the background: they go on when their clients have gone.

Such a call is answered at once, and then made by `generation`, as for a client that reads its whole
stream. Its events are kept, so that anybody of its tenant can ask how far it is, follow it from any
event on, or cancel it. Before: the routes. After: `generation`, and `kept_responses`, which has the
answer once it has ended.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Scope

from mesh.domain.access import TenantName
from mesh.domain.errors import Refused
from mesh.domain.reasons import RefusalReason
from mesh.http.bodies import Body
from mesh.http.exchange import ABORT, WATCH, Exchange
from mesh.http.refusals import encoded
from mesh.wire.access import caller

RUNS_MAX = 256
"""So many calls are made, or their events kept, at a time. Of those that have ended the oldest is
forgotten first.
"""
RUN_BYTES_MAX = 8 << 20
"""A call whose events take more than that fails."""
RUNS_BYTES_MAX = 64 << 20
"""All events that are kept."""


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One call: the events of its stream, of which the number of each is its place in the list."""

    queued: dict[str, Any]
    """The response before it has begun."""
    keep: Callable[[dict[str, Any]], None]
    """Keeps the response of a call that ends without one."""
    events: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    task: "asyncio.Task[None] | None" = None
    leave: Callable[[], None] = lambda: None
    """Ends the call as its client would by leaving."""
    ended: bool = False
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def response(self) -> dict[str, Any]:
        """The response of a call that has not ended."""
        return {**self.queued, "status": "in_progress" if self.events else "queued"}

    def add(self, events: bytes) -> None:
        """What the call has said."""
        self.size_bytes += len(events)
        self.events += [one + b"\n\n" for one in events.split(b"\n\n") if one]
        self._tell()

    def end(self, status: str | None, error: dict[str, Any] | None = None) -> None:
        """It is over: with this status, unless the events say how."""
        if self.ended:
            return
        self.ended = True
        if status is not None:
            answer = {**self.queued, "status": status, "error": error}
            self.keep(answer)
            if status == "failed":
                told = {"type": "response.failed", "sequence_number": len(self.events)}
                data = encoded({**told, "response": answer})
                self.events.append(b"event: response.failed\ndata: " + data + b"\n\n")
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def since(self, number: int) -> AsyncIterator[bytes]:
        """The events after the one of this number, until the last."""
        told = number + 1
        while True:
            more = self._more
            while told < len(self.events):
                yield self.events[told]
                told += 1
            if self.ended:
                return
            await more.wait()


class Runs:
    """Those of a server; each is its tenant's alone."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[TenantName, str], Run] = OrderedDict()

    def get(self, id_: str) -> Run | None:
        return self._runs.get((caller().tenant, id_))

    def forget(self, id_: str) -> None:
        """Also ends it."""
        run = self._runs.pop((caller().tenant, id_), None)
        if run is not None:
            cancel(run)

    def begin(self, id_: str, run: Run, app: ASGIApp, scope: Scope, raw: bytes) -> None:
        """Have the call made by `app`. Raises Refused where too many are under way."""
        self._make_room()
        if len(self._runs) >= RUNS_MAX:
            raise Refused(
                f"{RUNS_MAX} responses are made in the background, which is the limit",
                reason=RefusalReason.QUEUE_FULL,
                retry_after_s=1.0,
            )
        self._runs[caller().tenant, id_] = run
        run.task = asyncio.create_task(self._made(run, app, scope, raw))

    def _make_room(self, of: Run | None = None) -> None:
        size_bytes = sum(run.size_bytes for run in self._runs.values())
        for key, run in list(self._runs.items()):
            if size_bytes <= RUNS_BYTES_MAX and len(self._runs) < RUNS_MAX:
                return
            if run.ended and run is not of:
                size_bytes -= run.size_bytes
                del self._runs[key]

    async def _made(self, run: Run, app: ASGIApp, scope: Scope, raw: bytes) -> None:
        status, refused = 200, b""

        async def receive() -> Message:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, refused
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status != 200:
                refused += message["body"]
            else:
                run.add(message["body"])
                if run.size_bytes > RUN_BYTES_MAX:
                    size = f"its events take more than {RUN_BYTES_MAX} bytes"
                    run.end("failed", {"code": "server_error", "message": size})
                    run.leave()
                self._make_room(run)

        def watch(left: Callable[[], None]) -> Callable[[], None]:
            run.leave = left
            return lambda: None

        extensions = {WATCH: watch, ABORT: lambda: None}
        with suppress(asyncio.CancelledError):
            await app({**scope, "extensions": extensions}, receive, send)
        if status != 200:
            said = from_json(refused)["error"]["message"]
            code = "rate_limit_exceeded" if status == 429 else "server_error"
            run.end("failed", {"code": code, "message": said})
        run.end(None if run.events else "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """A call that is to be made in the background."""

    id_: str
    run: Run
    runs: Runs
    stream: bool
    """Whether its client follows it."""
    read: Callable[[bytes], tuple[Body, Any]]
    """Reads the same call as one that is streamed."""

    async def answer(self, exchange: Exchange, app: ASGIApp, scope: Scope, raw: bytes) -> None:
        """Begin it, and tell its client. Raises Refused where too many are under way."""
        self.runs.begin(self.id_, self.run, app, scope, raw)
        if not self.stream:
            await exchange.json(encoded(self.run.response))
            return
        with exchange.watched(lambda request_id: None):
            events = self.run.since(-1)
            await exchange.stream(await anext(events, b""))
            async for event in events:
                await exchange.write(event)
            await exchange.end()


def cancel(run: Run) -> None:
    """It is told as cancelled, if it has not ended."""
    if not run.ended:
        run.end("cancelled")
        run.leave()
        if run.task is not None:
            run.task.cancel()
