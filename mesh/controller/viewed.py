"""The cell as viewers of the page and of `/api/v1` see it, each what its key may.

Before: `mesh.http.feed`, which asks for pictures and lines. After: the core's snapshot, the log of
the cell, and the recent calls that the meter counts. `sampling` keeps the history of charts.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from math import inf
from typing import Protocol

from mesh.controller.lookup import seen_by
from mesh.controller.recent import ALL, Recent
from mesh.controller.snapshots import LOADED, cell_status, with_failed, with_starting
from mesh.controller.watch import CellLog
from mesh.core.controller.snapshot import Looking
from mesh.domain.access import Caller, Role
from mesh.domain.energy import together
from mesh.domain.ids import ModelId, NodeId
from mesh.domain.lifecycle import NodeState
from mesh.domain.messages import NodeStarting
from mesh.domain.recent import CellGauges, CellSample
from mesh.domain.values import replace
from mesh.domain.views import (
    CellEvent,
    CellLine,
    CellSnapshot,
    CellStatus,
    NodeSnapshot,
    OpenBatches,
)
from mesh.report.cell_state import CellPicture
from mesh.report.memory_parts import gauges
from mesh.runtime.clock import Now
from mesh.runtime.turns import others_first

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
    """What a picture asks of the core."""

    def look(self) -> Looking: ...

    def load(self) -> tuple[int, int]:
        """The requests that run and those that are queued."""
        ...


class Viewed:
    """`starting` says which nodes have not joined the cell yet, `failure` why the texts of a model
    cannot be used, if they cannot.
    """

    def __init__(
        self,
        *,
        cell: ViewedCell,
        starting: Callable[[], Sequence[NodeStarting]],
        failure: Callable[[ModelId], str],
        recent: Recent,
        log: CellLog,
        clock: Now,
        state_path: str,
        batches: Callable[[], Sequence[OpenBatches]] = tuple,
    ) -> None:
        self._cell = cell
        self._starting = starting
        self._failure = failure
        self._recent = recent
        self._log = log
        self._clock = clock
        self._state_path = state_path
        self._batches = batches
        self._started_s = clock.now_s()
        self._seen: dict[NodeId, tuple[float, NodeSnapshot]] = {}
        """The nodes of the last pictures, and when each was in one last."""
        self._gauges = -inf, CellGauges()
        """When the last picture was taken, and its gauges."""

    async def pictures(self, callers: Sequence[Caller]) -> list[CellPicture]:
        snapshot = with_failed(await self._looked(), self._failure)
        self._gauges = self._clock.now_s(), gauges(snapshot.nodes)
        self._see(snapshot.nodes)
        pictures = []
        for asks in callers:
            await asyncio.sleep(0)
            pictures.append(await self._picture(asks, snapshot))
        return pictures

    async def _looked(self) -> CellSnapshot:
        looking = self._cell.look()
        next(looking)
        begun_s = time.perf_counter()
        while True:
            try:
                looking.send(self._clock.now_s())
            except StopIteration as end:
                snapshot: CellSnapshot = end.value
                await asyncio.sleep(0)  # its reader adds all of it up, which takes a turn itself
                return snapshot
            begun_s = await others_first(begun_s)

    def _see(self, nodes: Sequence[NodeSnapshot]) -> None:
        now_s = self._clock.now_s()
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
        now_s, here = self._clock.now_s(), {node.node_id: node for node in nodes}
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
        }
        found = lost | here
        return tuple(found[node_id] for node_id in sorted(found))

    def samples(self, asks: Caller) -> Sequence[CellSample]:
        """The samples count what all tenants do: they are an operator's."""
        return self._recent.samples if asks.role is Role.ADMIN else ()

    def sees(self, asks: Caller, line: CellLine) -> bool:
        """A tenant sees what is about its own deployments."""
        return asks.sees(line.tenant)

    def lines(self, *, backlog: int, follow: bool) -> AsyncGenerator[CellEvent, None]:
        return self._log.watch(backlog=backlog, follow=follow)

    async def sampling(self) -> None:
        """Keep a sample a second, until it is cancelled."""
        for number in count():
            running, queued = self._cell.load()
            now_s, unix_s = self._clock.now_s(), round(time.time(), 3)
            at_s, seen = self._gauges
            if now_s - at_s > GAUGES_S:
                looks = number % GAUGE_SAMPLES == 0
                seen = gauges((await self._looked()).nodes) if looks else CellGauges()
            self._recent.sample(now_s, unix_s, running=running, queued=queued, gauges=seen)
            await asyncio.sleep(SAMPLE_S)

    async def _picture(self, asks: Caller, snapshot: CellSnapshot) -> CellPicture:
        now_s, operator = self._clock.now_s(), asks.role is Role.ADMIN
        here = with_starting(snapshot.nodes, self._starting()) if operator else ()
        nodes = self._with_lost(here) if operator else ()
        seen = snapshot if operator else _own(seen_by(asks, snapshot))
        names = tuple(one.spec.name for one in seen.deployments)
        recent_of, begun_s = {}, time.perf_counter()
        for name in names:
            recent_of[name] = self._recent.calls(now_s, (name,))
            begun_s = await others_first(begun_s)
        uptime_s = now_s - self._started_s
        batches = [of for of in self._batches() if operator or of.tenant == asks.tenant]
        status = cell_status(seen, batches, uptime_s=uptime_s, state_path=self._state_path)
        return CellPicture(
            status=status if operator else _own_status(status, seen),
            nodes=nodes,
            deployments=seen.deployments,
            recent=self._recent.calls(now_s, (ALL,) if operator else names),
            recent_of=recent_of,
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
