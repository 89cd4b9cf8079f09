"""A virtual node's agent, from its start to its end: the node core over a cost-model engine.

The same as `mesh_nodes.agent` and `mesh.wire.link` do with threads, a store and gRPC. It owns the
heartbeat and the link: it dials, waits for the welcome, and dials again after the end. Before:
`node`, and commands from its link. After: the link.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction
from mesh.domain.energy import Power
from mesh.domain.ids import OperationId
from mesh.domain.limits import HEARTBEAT_S, NodeLimits
from mesh.domain.messages import ImportFailed, LoadInstance, NodeCommand, NodeHello, NodeReport
from mesh.domain.model import WeightPrecision
from mesh.domain.node_events import CommandReceived, HeartbeatDue, LinkClosed, LinkOpened, NodeEvent
from mesh.domain.node_rule import NodeRule
from mesh.domain.steps import LoadOrder
from mesh.policy.rules.turns import TurnRule
from mesh.runtime.clock import Clock
from mesh.runtime.engine import Progress
from mesh.runtime.host import Host, Recorder
from mesh.runtime.link_life import LOOK_S, NO_EPOCH, CellEpoch, LinkLife, LinkLimits
from mesh.runtime.node_actions import Brought, NodePerformer
from mesh.sim.engine import CostEngine
from mesh.sim.kv_links import VirtualKvLinks
from mesh.sim.lanes import VirtualLanes
from mesh.sim.links import VirtualLinks

LINK_LIMITS = LinkLimits()


class VirtualAgent:
    """`identity` is the hello without instances. `ended` is called when it ends by itself."""

    def __init__(
        self,
        *,
        identity: NodeHello,
        limits: NodeLimits,
        engine_of: Callable[[Callable[[float], None]], CostEngine],
        clock: Clock,
        links: VirtualLinks,
        kv_links: VirtualKvLinks,
        recorder: Recorder,
        ended: Callable[[], None],
        own_rule: TurnRule | None = None,
        power: Power | None = None,
    ) -> None:
        self.node_id = identity.node_id
        self._identity = identity
        self._clock = clock
        self._links = links
        self._ended = ended
        self.alive = True
        self.leaves = False
        """It stops once nothing is loaded on it."""
        self._told_leaves = False
        self.link_id: int | None = None
        self.life = LinkLife(random.Random(identity.run_id), LINK_LIMITS, links.addresses)
        self._obeyed = NO_EPOCH
        self.core = NodeCore(limits=limits, own_rule=own_rule, power=power)
        self.lanes = VirtualLanes(clock)
        self.engine = engine_of(self.lanes.spend)
        self.lanes.more_load_s = self.engine.more_load_s
        self._kv_links = kv_links
        self._kv_end = kv_links.add(self.node_id, identity.kv_bytes_per_s, self.engine)
        performer = NodePerformer(
            engine=self.engine, lanes=self.lanes, link=self, models=self, kv=self._kv_end
        )
        self._host: Host[NodeEvent, NodeAction] = Host(
            core=self.core, clock=clock, perform=performer.perform, recorders=(recorder,)
        )
        self.lanes.post = self._tell

    def start(self) -> None:
        """Dial in, and report from then on."""
        self._dial()
        self._beat()
        if self._links.addresses > 1:
            self._look()

    def leave(self) -> None:
        """It is to stop, and is drained first."""
        self.leaves = True

    def kill(self, *, silently: bool) -> None:
        """It ends on the spot, and what its engine held is gone."""
        self.alive = False
        self._kv_links.remove(self._kv_end)
        self.engine.close()
        self.engine.working_until_s = self._clock.now_s()
        if self.link_id is not None:
            self._links.leave(self.link_id, silently=silently)
            self.link_id = None

    def _tell(self, event: NodeEvent) -> None:
        """What becomes of calls that an agent has made does not matter after its end."""
        if self.alive:
            self._host.post(event)

    def _beat(self) -> None:
        if not self.alive:
            return
        base_bytes = self._identity.base_bytes
        self.engine.bound_memory(self._identity.memory_bytes - base_bytes)
        books = self.engine.memory()
        engine_bytes = sum(m.weights_bytes + m.kv_held_bytes for m in books)
        engine_bytes += self.engine.kept_bytes()
        due = HeartbeatDue(
            rss_bytes=base_bytes + engine_bytes,
            engine_bytes=engine_bytes,
            kv_blocks_cached=tuple(
                (m.instance_id, m.kv_blocks_cached) for m in books if m.kv_blocks_cached
            ),
            leaves=self.leaves,
        )
        self._tell(due)
        if due.leaves and self._told_leaves and not self.core.instances():
            self.kill(silently=False)
        self._told_leaves = due.leaves
        self._clock.call_at(self._clock.now_s() + HEARTBEAT_S, self._beat)

    # Its link.

    def _dial(self) -> None:
        if not self.alive:
            return
        loaded, requests = self.core.instances(), self.core.requests()
        hello = replace(self._identity, instances=loaded, requests=requests, leaves=self.leaves)
        self.link_id = dialled = self._links.dial(self, hello, self.life.dial(), self._obeyed)
        if dialled is None:
            self._ended_with("Unavailable")
        else:
            until_s = self._clock.now_s() + LINK_LIMITS.welcome_s_max
            self._clock.call_at(until_s, lambda: self._give_up(dialled))

    def _give_up(self, link_id: int) -> None:
        if self.alive and self.link_id == link_id and not self.life.welcomed:
            self._leave("the controller does not answer")

    def _leave(self, reason: str) -> None:
        """Close the link at this end."""
        if self.link_id is not None:
            self._links.leave(self.link_id)
            self._closed("Unavailable", reason)

    def _look(self) -> None:
        """Whether another controller leads now."""
        if not self.alive:
            return
        self._clock.call_at(self._clock.now_s() + LOOK_S, self._look)
        for at in self.life.others():
            leads = self._links.leads(self.node_id, at, self._obeyed)
            if self.life.looked(at, leads=leads):
                self._leave("another controller leads now")

    def _ended_with(self, error: str) -> None:
        self.link_id = None
        pause_s = self.life.end(error)
        if pause_s is None:
            self.alive = False
            self._ended()
        else:
            self._clock.call_at(self._clock.now_s() + pause_s, self._dial)

    def accepted(self, link_id: int, rule: NodeRule, epoch: CellEpoch) -> None:
        if not self.alive or link_id != self.link_id:
            return
        if why := epoch.why_not_after(self._obeyed):
            self._leave(why)
            return
        self._obeyed = epoch
        self.life.welcome()
        self._tell(LinkOpened(rule=rule))

    def commanded(self, link_id: int, command: NodeCommand) -> None:
        if self.alive and link_id == self.link_id and self.life.welcomed:
            self._host.post(CommandReceived(command=command))

    def closed(self, link_id: int, error: str, reason: str) -> None:
        if self.alive and link_id == self.link_id:
            self._closed(error, reason)

    def _closed(self, error: str, reason: str) -> None:
        if self.life.welcomed:
            self.link_id = None
            self._tell(LinkClosed(reason=reason))
        self._ended_with(error)

    # The performer's ports.

    def send(self, report: NodeReport) -> None:
        if self.link_id is not None and self.life.welcomed:
            self._links.report(self.link_id, report)

    def start_import(
        self, operation_id: OperationId, source: str, weights: WeightPrecision | None
    ) -> None:
        """A virtual node has all the models that it will ever have."""
        self.lanes.post_soon(
            ImportFailed(
                operation_id=operation_id,
                error="UnknownSource",
                message=f"a virtual node imports nothing, so not {source} either",
                hint="name the model in the scenario",
            )
        )

    def stop_import(self, operation_id: OperationId) -> None:
        """There is none."""

    def at_hand(self, action: LoadInstance) -> LoadOrder:
        return action.order(Path(action.model.model_id))

    def bring(self, action: LoadInstance, progress: Progress, then: Brought) -> None:
        raise AssertionError("all models are at hand")
