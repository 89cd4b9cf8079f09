"""A controller's journal as a cell that can be looked at, at each of its decisions.

It owns a core, fed with the journal's events, and the recorders that a live controller has; going
back begins anew. Before: `mesh page --journal`, and the same feed and routes as a live cell's.
After: `mesh.runtime.journal`. Times count from the journal's first event.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path

from mesh.controller.lookup import no_request
from mesh.controller.metrics import Meter
from mesh.controller.recent import SAMPLES_MAX
from mesh.controller.viewed import Viewed
from mesh.controller.watch import CellLog
from mesh.domain.access import Caller, TenantName
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.usage import Usage, UsageBy
from mesh.domain.values import dataclass
from mesh.domain.views import CellEvent
from mesh.report.calls import CallBook
from mesh.report.cell_state import CellPicture
from mesh.report.memory_parts import gauges
from mesh.report.narrate import Narrator
from mesh.runtime.journal import (
    ControllerStart,
    Decision,
    decided_s,
    decision_fields,
    read_journal,
)
from mesh.runtime.starting import controller_core
from mesh.runtime.turns import at_once, others_first
from mesh.wire.work_threads import WorkThreads

SHOWN_CHARS_MAX = 4_000
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where one stands in the journal: after its first `index` decisions."""

    index: int
    events: int
    at_s: float
    span_s: float
    event: str = ""
    """The kind of the last event."""
    decision: str = ""
    """The decision on it, as the journal has it; a long one is cut."""


class JournalView:
    """The clock, too, of what looks at it. Raises InvalidInput for what is no controller's journal
    of this version of mesh.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        start, _ = read_journal(path)
        if not isinstance(start, ControllerStart):
            raise InvalidInput(
                f"{path} is the journal of a node or a front, which know nothing of the cell",
                hint="give that of a controller; `mesh sim --replay` decides the others again",
            )
        self._start = start
        self._events, self._first_s, self._last_s = _extent(path)
        self._seeking = asyncio.Lock()
        self._threads = WorkThreads()
        self._index = 0
        self._now_s = self._first_s
        self._next: Decision | None = None
        """The decision that was read already, and is not made yet."""
        self._torn: InvalidInput | None = None
        """Why it cannot be read on from here."""
        self._turn_s = 0.0
        """When others ran last, by the clock of this process."""
        self._begin()

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        """There is no wall clock in a journal."""
        return self._now_s - self._first_s

    @property
    def position(self) -> Position:
        last = self._last
        told = "" if last is None else json.dumps(decision_fields(last), indent=1)
        cut = f"{told[:SHOWN_CHARS_MAX]} …" if len(told) > SHOWN_CHARS_MAX else told
        return Position(
            index=self._index,
            events=self._events,
            at_s=self.unix_s(),
            span_s=self._last_s - self._first_s,
            event="" if last is None else type(last.event).__name__,
            decision=cut,
        )

    async def seek(self, index: int) -> None:
        """To after so many decisions, or the last. Raises InvalidInput where a line is none."""
        async with self._seeking:
            if index < self._index:
                self._begin()
            while self._index < index and await self._step():
                pass

    async def advance(self, seconds: float) -> None:
        """By so much of the journal's time. Raises InvalidInput where a line is none."""
        async with self._seeking:
            until_s = self._now_s + seconds
            while self._index < self._events:
                if self._next is None:
                    self._next = self._read()
                if self._next is None or self._next.now_s > until_s:
                    break
                await self._step()
            self._now_s = min(until_s, max(self._last_s, self._now_s))

    def _begin(self) -> None:
        """Raises InvalidInput where the journal cannot be read any more: one stays where one is."""
        self._decisions: Iterator[Decision] = read_journal(self._path)[1]
        self._core = controller_core(self._start)
        self._next = self._torn = None
        self._last: Decision | None = None
        self._index = 0
        self._now_s = self._sampled_s = self._first_s
        meter = Meter(known=lambda name: self._core.deployment(name) is not None)
        self._log = CellLog(narrate=Narrator(self._spec), now_s=self.now_s)
        book = CallBook(self._spec)
        self._recorders = (self._log, meter, book)
        self._recent = meter.recent
        self.viewed = Viewed(
            cell=self._core,
            clock=self,
            log=self._log,
            recent=meter.recent,
            book=book,
            cancel=_cancel,
            used_since=_usage,
            threads=self._threads,
            state_path=str(self._path),
            unix_s=self.unix_s,
        )

    def close(self) -> None:
        self._threads.close()

    async def _step(self) -> bool:
        """Whether there was a further decision. Others may run before it."""
        decision = self._next = self._next or self._read()
        if decision is None:
            return False
        await self._sample(decision.now_s)
        self._next = None
        self._core.handle(decision.event, decision.now_s)  # type: ignore[arg-type]
        for recorder in self._recorders:
            recorder.record(decision.now_s, decision.event, decision.actions)
        self._now_s, self._last = decision.now_s, decision
        self._index += 1
        return True

    async def _sample(self, until_s: float) -> None:
        """The seconds before the next decision, but of a long silence only those that are kept."""
        silent = max(int((until_s - self._sampled_s) / SAMPLE_S), 0)
        begun_s, self._sampled_s = self._sampled_s, self._sampled_s + silent * SAMPLE_S
        for n in range(max(silent - SAMPLES_MAX, 0) + 1, silent + 1):
            now_s = begun_s + n * SAMPLE_S
            running, queued = self._core.load()
            seen = at_once(gauges(self._core.snapshot(now_s).nodes))
            at_s = now_s - self._first_s
            self._recent.sample(now_s, at_s, running=running, queued=queued, gauges=seen)
            self._turn_s = await others_first(self._turn_s)
        self._turn_s = await others_first(self._turn_s)

    def _read(self) -> Decision | None:
        """Raises InvalidInput at a line that is no decision, each time."""
        if self._torn is not None:
            raise self._torn
        try:
            return next(self._decisions, None)
        except InvalidInput as error:
            self._torn = error
            raise

    def _spec(self, name: DeploymentName) -> DeploymentSpec | None:
        found = self._core.deployment(name)
        return None if found is None else found.spec

    # What the feed watches.

    async def pictures(self, callers: Sequence[Caller]) -> list[CellPicture]:
        return await self.viewed.pictures(callers)

    async def lines(self, *, backlog: int, follow: bool) -> AsyncGenerator[CellEvent, None]:
        """Those until now. None follow by themselves: each move tells them anew."""
        async for event in self._log.watch(backlog=backlog, follow=False):
            yield event
        if follow:
            await asyncio.Event().wait()


def _extent(path: Path) -> tuple[int, float, float]:
    """How many decisions there are, and the times of the first and the last."""
    count, first, last = 0, b"", b""
    with path.open("rb") as lines:
        lines.readline()
        for line in lines:
            if line.endswith(b"\n"):
                first, last, count = first or line, line, count + 1
    try:
        return count, _time(first), _time(last)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"the last line of {path} is no decision", hint="cut the journal before it"
        ) from error


def _time(line: bytes) -> float:
    return decided_s(json.loads(line)) if line else 0.0


def _cancel(request_id: RequestId) -> None:
    raise no_request(request_id)


async def _usage(
    since_unix_s: float, by: UsageBy | None, tenant: TenantName | None
) -> tuple[Usage, ...]:
    return ()
