"""What the page and `/api/v1` read of requests and of usage, each caller what its key may see.

Before: `mesh.http.reading`, which writes it. After: the book of calls, the gateway, which ends
requests, and the usage file.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from mesh.controller.lookup import find_deployment, no_request, seen_profiles
from mesh.controller.recent import Recent
from mesh.controller.watch import CellLog
from mesh.domain.access import Caller, Role
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.usage import Usage, UsageBy, summed
from mesh.domain.views import Deployed, NodesWanted, ProfileView
from mesh.report.call_views import chrome_trace, story, timeline
from mesh.report.calls import CallBook
from mesh.report.cell_report import CellReport, cell_report
from mesh.report.plain import Plain, plain
from mesh.runtime.clock import Now
from mesh.runtime.turns import in_turns


class ReadCell(Protocol):
    """What is read of the core."""

    def deployed(self) -> tuple[Deployed, ...]: ...

    def wanted(self, now_s: float) -> tuple[NodesWanted, ...]: ...

    def profiles(self, name: DeploymentName) -> tuple[ProfileView, ...] | None: ...


class Reading:
    """`cancel` ends an open request, `usage` gives what was used since a time, `log` what happened
    and `recent` how the nodes stood; `unix_s` is the wall clock.
    """

    def __init__(
        self,
        *,
        cell: ReadCell,
        book: CallBook,
        cancel: Callable[[RequestId], None],
        usage: Callable[[float], Awaitable[Sequence[Usage]]],
        log: CellLog,
        recent: Recent,
        clock: Now,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._cell = cell
        self._book = book
        self._cancel = cancel
        self._usage = usage
        self._log = log
        self._recent = recent
        self._clock = clock
        self._unix_s = unix_s
        self._started_s = clock.now_s()

    async def requests(self, asks: Caller, after: int) -> dict[str, Plain]:
        """Those that are open, and those that ended after the one of this number."""
        now_s = self._clock.now_s()
        unix_s = self._unix_s()
        return await in_turns(timeline(self._book, now_s, unix_s, after=after, sees=asks.sees))

    def request(self, asks: Caller, request_id: str) -> dict[str, Plain]:
        """Raises NotFound for one that is not known any more, or that is another tenant's."""
        found = self._book.find(request_id)
        if found is None or not asks.sees(found.tenant):
            raise no_request(RequestId(request_id))
        return story(found, self._clock.now_s(), self._unix_s())

    def end(self, asks: Caller, request_id: str) -> None:
        """Raises NotFound for one that is not open, or that is another tenant's."""
        found = self._book.open.get(RequestId(request_id))
        if found is None or not asks.sees(found.tenant):
            raise no_request(RequestId(request_id))
        self._cancel(found.request_id)

    def specs(self, asks: Caller, name: DeploymentName | None) -> list[DeploymentSpec]:
        """The specs of all deployments that the caller may see, or of one. Raises NotFound."""
        seen = self._seen(asks)
        found = seen if name is None else [find_deployment(name, seen)]
        return [one.spec for one in found]

    def profiles(self, asks: Caller, name: DeploymentName) -> list[ProfileView]:
        """Those that hold for a node come first. Raises NotFound."""
        find_deployment(name, self._seen(asks))
        # One that is being imported has none yet.
        return seen_profiles(asks, self._cell.profiles(name) or ())

    def _seen(self, asks: Caller) -> list[Deployed]:
        return [one for one in self._cell.deployed() if asks.may_see(one.spec)]

    def wanted(self) -> dict[str, Plain]:
        """How many nodes the cell wants, by kind. Raises Unavailable where that is not known."""
        found = self._cell.wanted(self._clock.now_s())
        if not found:
            raise Unavailable(
                "how many nodes are wanted is not known",
                hint="a controller with --nodes-wanted says so some seconds after it began to lead",
            )
        return {str(one.device): plain(one) for one in found}

    def trace(self, asks: Caller) -> Iterator[Plain]:
        return chrome_trace(self._book, self._clock.now_s(), asks.sees)

    async def usage(self, asks: Caller, since_unix_s: float, by: UsageBy) -> Plain:
        """Raises StorageError."""
        found = await self._usage(since_unix_s)
        mine = [one for one in found if asks.role is Role.ADMIN or one.tenant == asks.tenant]
        return plain(summed(mine, by))

    async def report(self, asks: Caller, since_s: float) -> CellReport:
        """The last `since_s` seconds, as far as they are known. A tenant is told of its calls
        and loads.
        """
        now_s, operator = self._clock.now_s(), asks.role is Role.ADMIN
        from_s = max(now_s - since_s, self._started_s)
        ends, sees = list(self._book.ends), asks.sees
        if ends and len(ends) == self._book.ends.maxlen:
            from_s = max(from_s, ends[0].at_s)
        loads = [load for load in self._book.loads if sees(load.tenant)]
        lines = [(at_s, line) for at_s, line in self._log.lines() if sees(line.tenant)]
        looks = list(self._recent.looks) if operator else []
        began_unix_s = self._unix_s() - (now_s - from_s)
        return await asyncio.to_thread(
            lambda: cell_report(
                "The cell",
                [end for end in ends if sees(end.tenant)],
                from_s=from_s,
                until_s=now_s,
                loads=loads,
                looks=looks,
                lines=lines,
                began_unix_s=began_unix_s,
            )
        )
