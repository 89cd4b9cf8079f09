"""The cell as viewers of the page and readers of `/api/v1` see it, each what its key may.

Before: `mesh.http.feed`, which asks for pictures and lines, `mesh.http.reading`, which writes what
is read of requests and of usage, and `control`. After: the core's snapshot, the log of the cell,
the recent calls that the meter counts, the book of calls, the gateway, which ends requests, and the
usage file. `sampling` keeps the history of charts.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Protocol

from mesh.controller.lookup import find_deployment, no_request, seen_by, seen_profiles
from mesh.controller.recent import ALL, Recent
from mesh.controller.snapshots import LOADED, cell_status, with_failed, with_starting
from mesh.controller.watch import CellLog
from mesh.core.controller.snapshot import Looking
from mesh.domain.access import Caller, Role, TenantName
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.energy import together
from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName, ModelId, NodeId, RequestId
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import NodeStarting
from mesh.domain.recent import CellGauges
from mesh.domain.usage import Usage, UsageBy
from mesh.domain.values import replace
from mesh.domain.views import (
    CellEvent,
    CellSnapshot,
    CellStatus,
    Deployed,
    NodeSnapshot,
    NodesWanted,
    OpenBatches,
    ProfileView,
)
from mesh.report.call_views import chrome_trace, story, timeline
from mesh.report.calls import CallBook
from mesh.report.cell_report import CellReport, cell_report
from mesh.report.cell_state import CellPicture
from mesh.report.memory_parts import gauges
from mesh.report.plain import Plain, plain
from mesh.runtime.clock import Now
from mesh.runtime.turns import in_turns, let_go, others_first
from mesh.wire.work_threads import WorkThreads

SAMPLE_S = 1.0
LOST_S, LOST_MAX = 300.0, 64
"""So long a node that was seen and is lost is shown as lost, and at most so many: those that were
lost last.
"""
GAUGES_S = 2.5
"""For so long the gauges of a picture are a sample's: pictures may come a little more seldom."""
GAUGE_SAMPLES = 15
"""While nobody views, a picture of the whole cell is taken once in so many samples."""


class ViewedCell(Protocol):
    """What viewers and readers are told of the core."""

    def look(self) -> Looking: ...

    def load(self) -> tuple[int, int]:
        """The requests that run and those that are queued."""
        ...

    def deployed(self, name: DeploymentName | None = None) -> tuple[Deployed, ...]:
        """All deployments, or the one of this name, where it is there."""
        ...

    def wanted(self, now_s: float) -> tuple[NodesWanted, ...]: ...

    def profiles(self, name: DeploymentName) -> tuple[ProfileView, ...] | None:
        """The profiles of the deployment, or `None` when there is no such deployment."""
        ...


@dataclass(slots=True, kw_only=True)
class Viewed:
    """What a caller may see of the cell: pictures, samples and lines for the page; requests, usage
    and reports for `/api/v1`.
    """

    cell: ViewedCell
    clock: Now
    log: CellLog
    recent: Recent
    book: CallBook
    cancel: Callable[[RequestId], None]
    """Ends an open request."""
    used_since: Callable[[float, UsageBy | None, TenantName | None], Awaitable[Sequence[Usage]]]
    """What was used since a time, of all tenants or of one."""
    threads: WorkThreads
    """Reports are made there, within the place of whoever asks."""
    failure: Callable[[ModelId], str] = lambda _: ""
    """Why the texts of a model cannot be used, if they cannot."""
    starting: Callable[[], Sequence[NodeStarting]] = tuple
    """The nodes that have not joined the cell yet."""
    batches: Callable[[], Sequence[OpenBatches]] = tuple
    """How far they are."""
    state_path: str = ""
    unix_s: Callable[[], float] = time.time
    """The wall clock."""
    started_s: float = field(init=False)
    _seen: dict[NodeId, tuple[float, NodeSnapshot]] = field(init=False, default_factory=dict)
    """The nodes of the last pictures, and when each was in one last."""
    _gauges: tuple[float, CellGauges] = field(init=False, default=(-inf, CellGauges()))
    """When the last picture was taken, and its gauges."""

    def __post_init__(self) -> None:
        self.started_s = self.clock.now_s()

    async def pictures(self, callers: Sequence[Caller]) -> list[CellPicture]:
        snapshot = with_failed(await self._looked(), self.failure)
        await asyncio.sleep(0)
        self._gauges = self.clock.now_s(), await in_turns(gauges(snapshot.nodes))
        self._see(snapshot.nodes)
        pictures = []
        for asks in callers:
            await asyncio.sleep(0)
            pictures.append(await self._picture(asks, snapshot))
        return pictures

    async def _looked(self) -> CellSnapshot:
        looking = self.cell.look()
        next(looking)
        begun_s = time.perf_counter()
        while True:
            try:
                looking.send(self.clock.now_s())
            except StopIteration as end:
                snapshot: CellSnapshot = end.value
                await asyncio.sleep(0)  # its reader adds all of it up, which takes a turn itself
                return snapshot
            begun_s = await others_first(begun_s)

    def _see(self, nodes: Sequence[NodeSnapshot]) -> None:
        now_s = self.clock.now_s()
        self._seen |= {node.node_id: (now_s, node) for node in nodes}
        kept = [(i, seen) for i, seen in self._seen.items() if seen[0] > now_s - LOST_S]
        here = {node.node_id for node in nodes}
        # A node that goes while it drains was stopped on purpose.
        lost = sorted(
            (
                (i, seen)
                for i, seen in kept
                if i not in here and seen[1].state is not NodeState.DRAINING
            ),
            key=lambda one: one[1][0],
        )
        self._seen = dict([one for one in kept if one[0] in here] + lost[-LOST_MAX:])

    def _with_lost(self, nodes: Sequence[NodeSnapshot]) -> tuple[NodeSnapshot, ...]:
        """The cell forgets a lost node at once; who views is told that it was there."""
        now_s, here = self.clock.now_s(), {node.node_id: node for node in nodes}
        lost = {
            node_id: replace(
                node,
                state=NodeState.LOST,
                silent_s=node.silent_s + now_s - at_s,
                instances=(),
                operations=(),
                promised_bytes=0,
                tracked_bytes=0,
                rss_bytes=0,
                unaccounted_bytes=0,
            )
            for node_id, (at_s, node) in self._seen.items()
            if node_id not in here
        }
        found = lost | here
        return tuple(found[node_id] for node_id in sorted(found))

    def lines(self, *, backlog: int, follow: bool) -> AsyncGenerator[CellEvent, None]:
        return self.log.watch(backlog=backlog, follow=follow)

    async def sampling(self) -> None:
        """Keep a sample a second, until it is cancelled."""
        for number in count():
            running, queued = self.cell.load()
            now_s, unix_s = self.clock.now_s(), round(time.time(), 3)
            at_s, seen = self._gauges
            if now_s - at_s > GAUGES_S:
                seen = CellGauges()
                if number % GAUGE_SAMPLES == 0:
                    snapshot = await self._looked()
                    seen = await in_turns(gauges(snapshot.nodes))
                    looked = [*snapshot.deployments, *snapshot.nodes]
                    del snapshot
                    await let_go(looked)
            self.recent.sample(now_s, unix_s, running=running, queued=queued, gauges=seen)
            await asyncio.sleep(SAMPLE_S)

    async def _picture(self, asks: Caller, snapshot: CellSnapshot) -> CellPicture:
        now_s, operator = self.clock.now_s(), asks.role is Role.ADMIN
        here = with_starting(snapshot.nodes, self.starting()) if operator else ()
        nodes = self._with_lost(here) if operator else ()
        seen = snapshot if operator else _own(seen_by(asks, snapshot))
        names = tuple(one.spec.name for one in seen.deployments)
        recent_of, begun_s = {}, time.perf_counter()
        for name in names:
            recent_of[name] = self.recent.calls(now_s, (name,))
            begun_s = await others_first(begun_s)
        batches = [of for of in self.batches() if operator or of.tenant == asks.tenant]
        await asyncio.sleep(0)
        of_all = self.recent.calls(now_s, (ALL,) if operator else names)
        await asyncio.sleep(0)
        status = self.status(seen, batches)
        return CellPicture(
            status=status if operator else _own_status(status, seen),
            nodes=nodes,
            deployments=seen.deployments,
            recent=of_all,
            recent_of=recent_of,
            # They count what all tenants do.
            samples=tuple(self.recent.samples) if operator else (),
        )

    def status(self, snapshot: CellSnapshot, batches: Sequence[OpenBatches]) -> CellStatus:
        uptime_s = self.clock.now_s() - self.started_s
        return cell_status(snapshot, batches, uptime_s=uptime_s, state_path=self.state_path)

    async def requests(self, asks: Caller, after: int) -> dict[str, object]:
        """Those that are open, and those that ended after the one of this number."""
        now_s = self.clock.now_s()
        unix_s = self.unix_s()
        return await in_turns(timeline(self.book, now_s, unix_s, after=after, sees=asks.sees))

    async def request(self, asks: Caller, request_id: str) -> dict[str, object]:
        """Raises NotFound for one that is not known any more, or that is another tenant's."""
        found = self.book.find(request_id)
        if found is None or not asks.sees(found.tenant):
            raise no_request(RequestId(request_id))
        return await in_turns(story(found, self.clock.now_s(), self.unix_s()))

    def end(self, asks: Caller, request_id: str) -> None:
        """Raises NotFound for one that is not open, or that is another tenant's."""
        found = self.book.open.get(RequestId(request_id))
        if found is None or not asks.sees(found.tenant):
            raise no_request(RequestId(request_id))
        self.cancel(found.request_id)

    def specs(self, asks: Caller, name: DeploymentName | None) -> list[DeploymentSpec]:
        """The specs of all deployments that the caller may see, or of one. Raises NotFound."""
        return [one.spec for one in self._deployed(asks, name)]

    def profiles(self, asks: Caller, name: DeploymentName) -> list[ProfileView]:
        """Those that hold for a node come first. Raises NotFound."""
        self._deployed(asks, name)
        # One that is being imported has none yet.
        return seen_profiles(asks, self.cell.profiles(name) or ())

    def _deployed(self, asks: Caller, name: DeploymentName | None) -> list[Deployed]:
        seen = [one for one in self.cell.deployed(name) if asks.may_see(one.spec)]
        if name is not None and not seen:
            find_deployment(name, self._deployed(asks, None))  # raises: others are named
        return seen

    def wanted(self) -> dict[str, Plain]:
        """How many nodes the cell wants, by kind. Raises Unavailable where that is not known."""
        found = self.cell.wanted(self.clock.now_s())
        if not found:
            raise Unavailable(
                "how many nodes are wanted is not known",
                hint="a controller with --nodes-wanted says so some seconds after it began to lead",
            )
        return {str(one.device): plain(one) for one in found}

    def trace(self, asks: Caller) -> Iterator[Plain]:
        return chrome_trace(self.book, self.clock.now_s(), asks.sees)

    async def usage(self, asks: Caller, since_unix_s: float, by: UsageBy | None) -> Sequence[Usage]:
        """Raises StorageError, and InvalidInput where it has too many lines."""
        tenant = None if asks.role is Role.ADMIN else asks.tenant
        return await self.used_since(since_unix_s, by, tenant)

    async def report(self, asks: Caller, since_s: float) -> CellReport:
        """The last `since_s` seconds, as far as they are known. A tenant is told of its calls
        and loads.
        """
        now_s, operator = self.clock.now_s(), asks.role is Role.ADMIN
        from_s = max(now_s - since_s, self.started_s)
        ends, sees = list(self.book.ends), asks.sees
        if ends and len(ends) == self.book.ends.maxlen:
            from_s = max(from_s, ends[0].at_s)
        loads = [load for load in self.book.loads if sees(load.tenant)]
        lines = [(at_s, line) for at_s, line in self.log.lines() if sees(line.tenant)]
        looks = list(self.recent.looks) if operator else []
        began_unix_s, specs = self.unix_s() - (now_s - from_s), self.specs(asks, None)
        return await self.threads.run(
            lambda: cell_report(
                "The cell",
                [end for end in ends if sees(end.tenant)],
                from_s=from_s,
                until_s=now_s,
                specs=specs,
                loads=loads,
                looks=looks,
                lines=lines,
                began_unix_s=began_unix_s,
            )
        )


def _own_status(status: CellStatus, seen: CellSnapshot) -> CellStatus:
    """With the tenant's own instances, and no path of the controller's machine."""
    own = [instance for one in seen.deployments for instance in one.instances]
    return replace(status, instances=sum(one.state in LOADED for one in own), state_path="")


def _own(snapshot: CellSnapshot) -> CellSnapshot:
    """The sums of a tenant's own deployments, and nothing of nodes and of others."""
    mine = snapshot.deployments
    return replace(
        snapshot,
        nodes=(),
        wanted=(),
        queued=sum(one.queued for one in mine),
        running=sum(one.running for one in mine),
        served=sum(one.served for one in mine),
        refused=(),
        energy=together(one.energy for one in mine),
    )
