"""The cell as viewers follow it: its whole state once, then what changes, as server-sent events.

While anybody views, one snapshot a second is taken for all, and each change is encoded once; while
nobody does, none is. Events are kept for a while, so that a viewer whose connection broke goes on
where it was. A viewer that reads too slowly is dropped and told. Before: `viewing`, which writes
the events. After: `Watched`, the controller's view of itself.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field, fields
from itertools import count, takewhile
from typing import Protocol

from mesh.domain.access import Caller, Role
from mesh.domain.errors import Unavailable
from mesh.domain.recent import CellSample
from mesh.domain.values import dataclass
from mesh.domain.views import CellEvent, CellLine
from mesh.report.cell_state import CellPicture, State, cell_state, change
from mesh.report.plain import json_pieces, members, plain_json
from mesh.runtime.turns import Steps, in_turns, let_go, others_first
from mesh.wire.mailbox import Mailbox

TICK_S = 1.0
LINES_S = 0.1
"""So long after the first of them lines are told, together: a person sees them at once, and first
tokens do not wait for as many writes as there are viewers.
"""
VIEWERS_MAX = 64
VIEWERS_BY_TENANT_MAX = 16
EXPECTED_S = 5.0
"""How long a prepared audience is kept for a viewer that has not come yet."""
VIEWER_EVENTS_MAX = 120
"""At most so many events wait for one viewer: about two minutes of an idle cell's."""
KEPT_EVENTS_MAX = 600
KEPT_BYTES_MAX = 8 << 20
"""So much is kept for viewers that come back, of each audience."""
LINES_MAX = 200
"""So many of the last lines come with the whole state."""
STATE_DEPTH = 2
"""Members of a state within so many levels are encoded each by itself; smaller ones cost more."""
LOST = "what happened since then is not kept any more"
DROPPED = f"this viewer reads too slowly: {VIEWER_EVENTS_MAX} events waited for it"
ENDED = "the controller is stopping"

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """What viewers see, as the controller gives it."""

    async def pictures(self, callers: Sequence[Caller]) -> list[CellPicture]:
        """The cell as each of these callers may see it, all from one snapshot."""
        ...

    def lines(self, *, backlog: int, follow: bool) -> AsyncGenerator[CellEvent, None]: ...


@dataclass(slots=True, eq=False)
class _Viewer:
    blocks: Mailbox[bytes] = field(default_factory=lambda: Mailbox(VIEWER_EVENTS_MAX))
    missed: bool = False


@dataclass(slots=True, eq=False)
class _Audience:
    """Viewers who may see the same, what they were told last, and the events that led there."""

    mark: str
    """The ids of its events begin so, and no others, not even those of an earlier controller."""
    number: int = 0
    """The number of its last event."""
    state: State = field(default_factory=dict)
    samples: Sequence[CellSample] = ()
    whole: list[bytes] = field(default_factory=list)
    """That state and its samples as JSON, in pieces, once somebody needs it."""
    viewers: list[_Viewer] = field(default_factory=list)
    kept: deque[bytes] = field(default_factory=deque)
    """The last events, without a gap."""
    kept_bytes: int = 0
    looking: asyncio.Task[None] | None = None
    """The task of a first look that began before there was a viewer."""

    @property
    def end(self) -> bytes:
        """Ends the event after which a viewer has heard all that was told so far."""
        return f"id: {self.mark}-{self.number}\n\n".encode()

    def sees(self, state: State, samples: Sequence[CellSample]) -> None:
        """Its viewers are shown this from now on."""
        self.state, self.samples, self.whole = state, samples, []

    def tell(self, event: bytes) -> None:
        self.number += 1
        block = event + self.end
        self.kept.append(block)
        self.kept_bytes += len(block)
        while len(self.kept) > KEPT_EVENTS_MAX or self.kept_bytes > KEPT_BYTES_MAX:
            self.kept_bytes -= len(self.kept.popleft())
        for viewer in self.viewers:
            if not viewer.blocks.put(block):
                viewer.missed = True
                viewer.blocks.close()

    def since(self, last_id: str) -> list[bytes] | None:
        """The events after the one of this id; `None` where it is no id of this audience, or not
        all of them are here.
        """
        for later in range(len(self.kept) + 1):
            if last_id == f"{self.mark}-{self.number - later}":
                return list(self.kept)[len(self.kept) - later :]
        return None


class Feed:
    """`run` tells its ids of events and lines from those of an earlier controller; `unix_s` is the
    wall clock.
    """

    def __init__(self, watched: Watched, *, run: str, unix_s: Callable[[], float]) -> None:
        self._watched = watched
        self._run = run
        self._unix_s = unix_s
        self._made = count(1)
        """Numbers the audiences that there were."""
        self._audiences: dict[Caller, _Audience] = {}
        self._lines: deque[tuple[CellLine, bytes]] = deque(maxlen=LINES_MAX)
        self._fresh: list[tuple[CellLine, bytes]] = []
        """Those that are not told yet."""
        self._refreshing, self._encoding = asyncio.Lock(), asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def viewers(self) -> int:
        return sum(len(audience.viewers) for audience in self._audiences.values())

    async def cell(self, asks: Caller) -> list[bytes]:
        """The whole state as JSON, in pieces: what viewers were told last, where there are any."""
        audience = self._audiences.get(_audience_of(asks))
        if audience is None or not audience.viewers or not audience.state:
            audience = _Audience("")
            (picture,) = await self._watched.pictures([asks])
            audience.sees(await in_turns(cell_state(picture)), picture.samples)
        return await self._whole(audience, "")

    def expect(self, asks: Caller) -> None:
        """Look at the cell while the browser of a viewer, who comes soon, gets ready."""
        key = _audience_of(asks)
        if key in self._audiences or len(self._audiences) >= VIEWERS_MAX or self._closed:
            return
        audience = self._begin_audience(key)
        audience.looking = asyncio.create_task(self._prepare(key, audience))
        asyncio.get_running_loop().call_later(EXPECTED_S, self._drop, key, audience)

    async def events(self, asks: Caller, last_id: str) -> AsyncGenerator[list[bytes], None]:
        """The events after the one of `last_id`; where that is not possible, the whole state, which
        says so, in pieces. Raises Unavailable when too many view already.
        """
        key, viewer = _audience_of(asks), _Viewer()
        audience = self._audiences.get(key)
        self._check_room(key, audience)
        if audience is None:
            audience = self._begin_audience(key)
        audience.viewers.append(viewer)
        try:
            if not audience.state:
                await self._look_first(key, audience)
            self._begin()
            blocks = audience.since(last_id)
            if blocks is None:
                # What is told from here on comes after this state.
                self._tell_lines()
                viewer.blocks = Mailbox(VIEWER_EVENTS_MAX)
                if self._closed:
                    viewer.blocks.close()
                end = audience.end
                blocks = [*await self._opening(asks, audience, LOST if last_id else ""), end]
            yield blocks
            while more := await viewer.blocks.take():
                yield [b"".join(more)]
            why = plain_json({"why": DROPPED if viewer.missed else ENDED})
            yield [b"event: end\ndata: %b\n\n" % why]
        finally:
            audience.viewers.remove(viewer)
            self._drop(key, audience)

    async def again(self) -> None:
        """Tell everybody the whole anew: what is watched has moved, and no change leads there."""
        if not self._audiences:
            return
        self._lines.clear()
        async with aclosing(self._watched.lines(backlog=LINES_MAX, follow=False)) as events:
            async for event in events:
                self._keep(event)
        async with self._refreshing:
            audiences = dict(self._audiences)
            pictures = await self._watched.pictures(list(audiences))
            for (asks, audience), picture in zip(audiences.items(), pictures, strict=True):
                audience.sees(await in_turns(cell_state(picture)), picture.samples)
                self._tell_lines()
                audience.tell(b"".join(await self._opening(asks, audience, "")))

    def close(self) -> None:
        """End every viewer's events when they have been told what there is."""
        self._closed = True
        self._tell_lines()
        self._rest()
        for audience in self._audiences.values():
            for viewer in audience.viewers:
                viewer.blocks.close()

    def _begin_audience(self, key: Caller) -> _Audience:
        """Adds an audience that knows nothing yet."""
        self._audiences[key] = _Audience(f"{self._run}-{next(self._made)}")
        return self._audiences[key]

    def _drop(self, key: Caller, audience: _Audience) -> None:
        """Removes an audience that has no viewers."""
        if not audience.viewers and self._audiences.get(key) is audience:
            del self._audiences[key]
        if not self._audiences:
            self._rest()

    async def _prepare(self, key: Caller, audience: _Audience) -> None:
        await self._look_first(key, audience)
        await self._whole(audience, "")

    async def _look_first(self, key: Caller, audience: _Audience) -> None:
        async with self._refreshing:
            if not audience.state:  # viewers that come together share one snapshot
                await self._look({key: audience})

    def _check_room(self, asks: Caller, audience: _Audience | None) -> None:
        if self._closed:
            raise Unavailable(ENDED)
        have, most = self.viewers, VIEWERS_MAX
        if asks.role is not Role.ADMIN:
            most -= VIEWERS_BY_TENANT_MAX  # there is room for operators
            if audience is not None and len(audience.viewers) >= VIEWERS_BY_TENANT_MAX:
                have = most = VIEWERS_BY_TENANT_MAX
        if have >= most:
            raise Unavailable(
                f"{have} viewers are here already, and {most} is the limit",
                hint="close one of their pages, or ask for /api/v1/cell",
            )

    async def _opening(self, asks: Caller, audience: _Audience, why: str) -> list[bytes]:
        """The whole state, and the last lines."""
        lines = _lines_event(asks, self._lines)
        body = await self._whole(audience, why)
        return [b"event: cell\ndata: ", *body, b"\n" + (lines and b"\n" + lines)]

    async def _whole(self, audience: _Audience, why: str) -> list[bytes]:
        """What the audience sees now, and `why` it is told the whole. One is encoded at a time: in
        one turn of the loop each of many would go on.
        """
        state, samples = audience.state, audience.samples
        async with self._encoding:
            whole = audience.whole if audience.state is state else []
            if not whole:
                whole = await in_turns(_whole(state, samples))
                if audience.state is state:
                    audience.whole = whole
        return [b'{"why":%b,' % plain_json(why), *whole]

    def _begin(self) -> None:
        if not self._tasks and not self._closed:
            self._lines.clear()  # `_follow` tells them
            self._fresh.clear()
            self._tasks = [asyncio.create_task(run()) for run in (self._tick, self._follow)]

    def _rest(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                async with self._refreshing:
                    await self._look(dict(self._audiences))
            except Exception:
                logger.exception("viewers were not told what has changed")

    async def _look(self, audiences: Mapping[Caller, _Audience]) -> None:
        """Tell each audience what has changed. Not twice at a time: states follow each other. One
        that cannot be told is told at the next look; raises what befell one that knows nothing yet.
        """
        pictures = await self._watched.pictures(list(audiences))
        for audience, picture in zip(audiences.values(), pictures, strict=True):
            try:
                state, block = await in_turns(_next(audience, picture))
            except Exception:
                if not audience.state:
                    raise
                logger.exception("viewers were not told what has changed")
                continue
            parts = (one for one in audience.state.values() if isinstance(one, dict))
            before = [inner for part in parts for inner in part.values()]
            audience.sees(state, picture.samples)
            if block:
                audience.tell(block)
            await let_go(before)
            await asyncio.sleep(0)

    async def _follow(self) -> None:
        """Tell lines as they come. The log may have no place for one more, or drop a slow one."""
        backlog = LINES_MAX
        while True:
            try:
                async with aclosing(self._watched.lines(backlog=backlog, follow=True)) as events:
                    begun_s = time.perf_counter()
                    async for event in events:
                        self._line(event)
                        begun_s = await others_first(begun_s)
            except Unavailable:
                pass
            except Exception:
                logger.exception("viewers were not told a line")
            backlog = 0
            await asyncio.sleep(TICK_S)

    def _line(self, event: CellEvent) -> None:
        if not self._fresh:
            asyncio.get_running_loop().call_later(LINES_S, self._tell_lines)
        self._keep(event)
        self._fresh.append(self._lines[-1])

    def _tell_lines(self) -> None:
        fresh, self._fresh = self._fresh, []
        for asks, audience in self._audiences.items():
            if event := _lines_event(asks, fresh):
                audience.tell(event)

    def _keep(self, event: CellEvent) -> None:
        at_s = round(self._unix_s() - event.age_s, 3)
        line_id = f"{self._run}-{event.line.tenant}-{event.number}"
        told = plain_json({"line_id": line_id, "time_unix_s": at_s, **members(event.line)})
        self._lines.append((event.line, told))


def _audience_of(asks: Caller) -> Caller:
    """Whoever sees the same is told the same: all operators, and all keys of a tenant."""
    return Caller() if asks.role is Role.ADMIN else Caller(role=asks.role, tenant=asks.tenant)


def _lines_event(asks: Caller, lines: Iterable[tuple[CellLine, bytes]]) -> bytes:
    """One event, so that a viewer takes all or none, of those that the caller may see, if any."""
    seen = b",".join(told for line, told in lines if asks.sees(line.tenant))
    return seen and b"event: lines\ndata: [%b]\n" % seen


def _next(audience: _Audience, picture: CellPicture) -> Steps[tuple[State, bytes]]:
    """The state that the picture shows, and the event that says what has changed. There is none
    where nothing was told before.
    """
    after = yield from cell_state(picture)
    if not audience.state:
        return after, b""
    last = audience.samples[-1:]
    untold = list(takewhile(lambda one: one not in last, reversed(picture.samples)))[::-1]
    patch = yield from change(audience.state, after)
    body = yield from json_pieces({"patch": patch, "samples": untold}, STATE_DEPTH + 1)
    return after, b"".join([b"event: change\ndata: ", *body, b"\n"])


def _whole(state: State, samples: Sequence[CellSample]) -> Steps[list[bytes]]:
    """The members of an object, without its opening brace."""
    columns = {}
    for one in fields(CellSample):
        columns[one.name] = [getattr(sample, one.name) for sample in samples]
        yield
    first, *others = yield from json_pieces({**state, "samples": columns}, STATE_DEPTH)
    return [first[1:], *others]
