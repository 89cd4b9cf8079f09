"""The cell's events in words, as a recorder of the controller's host: the last ones, and watchers.

It owns a ring of lines and a bounded mailbox for each watcher. A watcher that lets its mailbox fill
is dropped with a note, rather than slowing the cell down or hiding that lines are missing.
"""

from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import field
from itertools import count, islice

from mesh.domain.access import ANYONE, Caller, Role
from mesh.domain.errors import Unavailable
from mesh.domain.values import dataclass, replace
from mesh.domain.views import CellEvent, CellLine
from mesh.report.calls import TEXT_CHARS_MAX
from mesh.wire.mailbox import Mailbox

LINES_MAX = 10_000
"""At most so many lines are kept for those who ask later."""
WATCHERS_MAX = 64
WATCHERS_BY_TENANT_MAX = 8
TENANTS_WATCHERS_MAX = 32
"""All tenants together have at most so many: there is room for operators, and for the page."""
WATCHER_LINES_MAX = 2_000
"""At most so many lines may wait for one watcher to read."""

Narrate = Callable[[object, Sequence[object]], Sequence[CellLine]]
_Line = tuple[int, float, CellLine]
"""Its number among those of its tenant, its time by the host's clock, and what it says."""


@dataclass(slots=True, eq=False)
class _Watcher:
    asks: Caller
    lines: Mailbox[_Line] = field(default_factory=lambda: Mailbox(WATCHER_LINES_MAX))
    missed: bool = False


class CellLog:
    """`narrate` puts a decision in words; `now_s` is the clock of the host that this records."""

    def __init__(self, *, narrate: Narrate, now_s: Callable[[], float]) -> None:
        self._narrate = narrate
        self._now_s = now_s
        # By tenant: none is to tell from its numbers how much is said of others.
        self._numbers = defaultdict[str, Iterator[int]](lambda: count(1))
        self._lines: deque[_Line] = deque(maxlen=LINES_MAX)
        self._watchers: list[_Watcher] = []
        self._closed = False

    def lines(self) -> list[tuple[float, CellLine]]:
        """All that are kept, each with its time by the host's clock."""
        return [(at_s, said) for _, at_s, said in self._lines]

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        for said in self._narrate(event, actions):
            line = (next(self._numbers[said.tenant]), now_s, _cut(said))
            self._lines.append(line)
            for watcher in self._watchers:
                if watcher.asks.sees(said.tenant) and not watcher.lines.put(line):
                    watcher.missed = True
                    watcher.lines.close()

    def close(self) -> None:
        """End every watch when it has been told what there is."""
        self._closed = True
        for watcher in self._watchers:
            watcher.lines.close()

    async def watch(
        self, *, backlog: int, follow: bool, asks: Caller = ANYONE
    ) -> AsyncGenerator[CellEvent, None]:
        """The last `backlog` lines that the caller may see, then with `follow` new ones. Raises
        Unavailable when too many watch already.
        """
        watcher = _Watcher(asks)
        seen = (line for line in reversed(self._lines) if asks.sees(line[2].tenant))
        earlier = list(islice(seen, backlog))[::-1]
        if follow and not self._closed:
            self._check_room(asks)
            self._watchers.append(watcher)
        else:
            watcher.lines.close()
        try:
            for line in earlier:
                yield self._aged(line)
            while lines := await watcher.lines.take():
                for line in lines:
                    yield self._aged(line)
            if watcher.missed:
                yield CellEvent(number=0, age_s=0.0, line=_DROPPED)
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def _check_room(self, asks: Caller) -> None:
        """Raises Unavailable."""
        tenants = [one.asks.tenant for one in self._watchers if one.asks.role is not Role.ADMIN]
        bounds = [(len(self._watchers), WATCHERS_MAX)]
        if asks.role is not Role.ADMIN:
            bounds += [
                (len(tenants), TENANTS_WATCHERS_MAX),
                (tenants.count(asks.tenant), WATCHERS_BY_TENANT_MAX),
            ]
        for have, most in bounds:
            if have >= most:
                raise Unavailable(
                    f"{have} watchers are here already, which is the limit",
                    hint="end one of them, or look without --follow",
                )

    def _aged(self, line: _Line) -> CellEvent:
        number, at_s, said = line
        return CellEvent(number=number, age_s=max(0.0, self._now_s() - at_s), line=said)


def _cut(line: CellLine) -> CellLine:
    if len(line.text) <= TEXT_CHARS_MAX:
        return line
    return replace(line, text=f"{line.text[:TEXT_CHARS_MAX]} …")


_DROPPED = CellLine(
    kind="cell",
    subject="watch",
    text=f"you read too slowly: {WATCHER_LINES_MAX} lines waited, later ones are missing here; "
    "watch again",
)
