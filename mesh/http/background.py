"""Responses that are made in the background: they go on when their clients have gone.

Such a call is answered at once, and then made by `generation`, as for a client that reads its whole
stream. Its events are kept, so that anybody of its tenant can ask how far it is, follow it from any
event on, or cancel it. Before: the routes. After: `generation`, and `kept_responses`, which has the
answer once it has ended.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Scope

from mesh.domain.access import NOBODY, TenantName
from mesh.domain.errors import Refused
from mesh.domain.reasons import RefusalReason
from mesh.http.bodies import Body
from mesh.http.exchange import ABORT, WATCH, Apart, Exchange
from mesh.http.refusals import encoded
from mesh.wire.access import caller

RUNS_MAX = 256
"""The most calls that are made, or whose events are kept, at a time."""
RUN_BYTES_MAX = 8 << 20
"""A call whose events take more than that fails."""
RUNS_BYTES_MAX = 64 << 20
"""The most memory of all of them: the bodies and input items of those that run, and all events."""
TENANT_SHARE_MAX = 0.5
"""The calls that one tenant has running take at most this share of each limit."""
_Key = tuple[TenantName, str]
_WRONG = (400, 404, 413, 422)
"""The statuses of calls that fail by what their clients have sent."""


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One call: the events of its stream, of which the number of each is its place in the list."""

    response_queued: dict[str, Any]
    """The response before it has begun."""
    keep: Callable[[dict[str, Any]], None] | None
    """Keeps the response of a call that ends without one."""
    given_bytes: int
    """The size of the call's body and input items, which are held until it has ended."""
    events: list[bytes] = field(default_factory=list)
    events_bytes: int = 0
    counted_bytes: int = 0
    """What `Runs` has counted of its size."""
    task: "asyncio.Task[None] | None" = None
    leave: Callable[[], None] = lambda: None
    """Ends the call as its client would by leaving."""
    ended: bool = False
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size_bytes(self) -> int:
        return self.given_bytes + self.events_bytes

    @property
    def response(self) -> dict[str, Any]:
        """The response of a call that has not ended."""
        return {**self.response_queued, "status": "in_progress" if self.events else "queued"}

    def add(self, events: bytes) -> None:
        """Append what the call has said."""
        self.events_bytes += len(events)
        self.events += [one + b"\n\n" for one in events.split(b"\n\n") if one]
        self._tell()

    def end(self, status: str | None, error: dict[str, Any] | None = None) -> None:
        """End the call with this status; without one, the events say how it ended."""
        if self.ended:
            return
        self.ended = True
        if status is not None and self.keep is not None:
            answer = {**self.response_queued, "status": status, "error": error}
            self.keep(answer)
            if status == "failed":
                event = {"type": "response.failed", "sequence_number": len(self.events)}
                data = encoded({**event, "response": answer})
                self.add(b"event: response.failed\ndata: " + data + b"\n\n")
        self.keep, self.response_queued = None, {}  # they hold the input
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def since(self, number: int) -> AsyncIterator[bytes]:
        """The events after the one of this number, until the last."""
        next_ = number + 1
        while True:
            more = self._more
            while next_ < len(self.events):
                yield self.events[next_]
                next_ += 1
            if self.ended:
                return
            await more.wait()


class Runs:
    """The calls of a server; each is its tenant's alone. Beyond the limits, calls that have ended
    are forgotten, the oldest of the tenant that takes most first; then the largest call that runs
    fails.
    """

    def __init__(self) -> None:
        self._runs: dict[_Key, Run] = {}
        """The oldest first."""
        self._bytes = 0

    def get(self, id_: str) -> Run | None:
        return self._runs.get((caller().tenant, id_))

    def forget(self, id_: str) -> None:
        """Cancel a call that has not ended, and forget its events."""
        run = self.get(id_)
        if run is not None:
            self._drop((caller().tenant, id_))
            cancel(run)

    def begin(self, id_: str, run: Run, app: ASGIApp, scope: Scope, raw: bytes) -> None:
        """Have the call made by `app`. Raises Refused where too many are under way."""
        tenant = caller().tenant
        running = [(key[0], one) for key, one in self._runs.items() if not one.ended]
        _check([one for _, one in running], run, 1.0, "calls in the background")
        if tenant != NOBODY:
            own = [one for whose, one in running if whose == tenant]
            _check(own, run, TENANT_SHARE_MAX, f"calls of {tenant!r} in the background")
        key = tenant, id_
        self._runs[key] = run
        self._count(key, run)
        self._make_room()
        run.task = asyncio.create_task(self._made(key, run, app, scope, [raw]))
        run.task.add_done_callback(lambda _: self._freed(key, run))

    def _freed(self, key: _Key, run: Run) -> None:
        """Count what is left of a run whose task, which held its call, has ended."""
        run.given_bytes = 0
        self._count(key, run)

    def _count(self, key: _Key, run: Run) -> None:
        if self._runs.get(key) is run:
            self._bytes += run.size_bytes - run.counted_bytes
            run.counted_bytes = run.size_bytes

    def _drop(self, key: _Key) -> None:
        self._bytes -= self._runs.pop(key).counted_bytes

    def _make_room(self) -> None:
        while len(self._runs) > RUNS_MAX or self._bytes > RUNS_BYTES_MAX:
            shares = Counter[TenantName]()
            for (tenant, _), run in self._runs.items():
                shares[tenant] += run.size_bytes + RUNS_BYTES_MAX // RUNS_MAX
            ended = [key for key, run in self._runs.items() if run.ended]
            if ended:
                self._drop(max(ended, key=lambda key: shares[key[0]]))
                continue
            largest = max(self._runs.values(), key=lambda run: run.size_bytes)
            _fail(largest, f"calls in the background take more than {RUNS_BYTES_MAX} bytes")

    async def _made(
        self, key: _Key, run: Run, app: ASGIApp, scope: Scope, raws: list[bytes]
    ) -> None:
        status, refused = 200, b""

        async def receive() -> Message:
            return {"type": "http.request", "body": raws.pop(), "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, refused
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status != 200:
                refused += message["body"]
            elif not run.ended:
                run.add(message["body"])
                if run.events_bytes > RUN_BYTES_MAX:
                    _fail(run, f"its events take more than {RUN_BYTES_MAX} bytes")
                self._count(key, run)
                self._make_room()

        def watch(left: Callable[[], None]) -> Callable[[], None]:
            run.leave = left
            return lambda: None

        extensions = {WATCH: watch, ABORT: lambda: None}
        with suppress(asyncio.CancelledError):
            await app({**scope, "extensions": extensions}, receive, send)
        if status != 200:
            message = from_json(refused)["error"]["message"]
            code = "invalid_prompt" if status in _WRONG else "server_error"
            code = "rate_limit_exceeded" if status == 429 else code
            run.end("failed", {"code": code, "message": message})
        run.end(None if run.events else "cancelled")


def _check(running: Sequence[Run], further: Run, share: float, what: str) -> None:
    """Raises Refused where these and a further one take more than a share of the limits."""
    size_bytes = sum(run.size_bytes for run in running) + further.size_bytes
    if len(running) < RUNS_MAX * share and size_bytes <= RUNS_BYTES_MAX * share:
        return
    raise Refused(
        f"{len(running)} {what} run, and take {size_bytes} bytes with this one; the limits are "
        f"{RUNS_MAX * share:.0f} and {RUNS_BYTES_MAX * share:.0f}",
        reason=RefusalReason.QUEUE_FULL,
        retry_after_s=1.0,
    )


def _fail(run: Run, message: str) -> None:
    run.end("failed", {"code": "server_error", "message": message})
    run.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Background(Apart):
    """A call that is to be made in the background."""

    id_: str
    run: Run
    runs: Runs
    stream: bool
    """Whether its client follows it."""
    read: Callable[[bytes], tuple[Body, Any]]
    """Reads the same call as one that is streamed."""

    async def answer(
        self, exchange: Exchange, reads: Callable[[Any], ASGIApp], scope: Scope, raw: bytes
    ) -> None:
        """Begin it, and tell its client. Raises Refused where too many are under way."""
        self.runs.begin(self.id_, self.run, reads(self.read), scope, raw)
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
    """End a call as cancelled, if it has not ended."""
    if not run.ended:
        run.end("cancelled")
        run.leave()
        if run.task is not None:
            run.task.cancel()
