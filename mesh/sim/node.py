"""A virtual node: the node core and its performer over a cost-model engine.

The same as `mesh_nodes.agent` does with threads, a store and gRPC. It owns the node's heartbeat and
how long the node has been in use. Before: `cluster`, and commands from its link. After: the link.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mesh.core.node import NodeCore
from mesh.domain.actions import NodeAction, StartLoad
from mesh.domain.ids import ModelId, OperationId
from mesh.domain.limits import HEARTBEAT_S, NodeLimits
from mesh.domain.messages import NodeHello, NodeReport
from mesh.domain.node_events import HeartbeatDue, ImportBroke, LinkClosed, NodeEvent
from mesh.domain.steps import LoadOrder
from mesh.runtime.clock import Clock
from mesh.runtime.engine import Progress
from mesh.runtime.host import Host
from mesh.runtime.node_actions import Lane, NodePerformer
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.engine import CostEngine
from mesh.sim.lanes import VirtualLanes
from mesh.sim.links import VirtualLinks

REDIAL_S = 1.0
"""From the end of a link to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """`hello` without instances; `models` that the node can load, by id."""

    hello: NodeHello
    models: Mapping[ModelId, ModelCosts]
    costs: NodeCosts = field(default_factory=NodeCosts)
    limits: NodeLimits = field(default_factory=NodeLimits)
    kept_s: float = 0.0
    """It counts as in use for so long after its last request, step or load."""


class VirtualNode:
    def __init__(self, plan: NodePlan, *, clock: Clock, links: VirtualLinks) -> None:
        self.plan = plan
        self._clock = clock
        self._links = links
        self._link_id: int | None = None
        self._core = NodeCore(limits=plan.limits)
        self._lanes = VirtualLanes(clock)
        self._engine = CostEngine(
            models=plan.models,
            costs=plan.costs,
            memory_bytes=plan.hello.memory_bytes - plan.hello.base_bytes,
            spend=self._lanes.spend,
            now_s=clock.now_s,
        )
        performer = NodePerformer(engine=self._engine, lanes=self._lanes, link=self, models=self)
        self._host: Host[NodeEvent, NodeAction] = Host(
            core=self._core, clock=clock, perform=performer.perform, recorders=(self,)
        )
        self._lanes.post = self._host.post
        self.used_s = 0.0
        """How long it has been in use: with requests, a step or a load, and `kept_s` after."""
        self._looked_s = clock.now_s()
        self._kept_until_s = -math.inf

    def start(self) -> None:
        """Dial in, and report from then on."""
        self._link_id = self._links.dial(self)
        self._beat()

    @property
    def engine(self) -> CostEngine:
        """For those who look at it from outside: what it holds, and what it has done."""
        return self._engine

    @property
    def computing_s(self) -> float:
        """Seconds on the compute lane."""
        return self._lanes.busy_s[Lane.COMPUTE]

    def tell(self, event: NodeEvent) -> None:
        self._host.post(event)
        if isinstance(event, LinkClosed):
            self._clock.call_at(self._clock.now_s() + REDIAL_S, self._redial)

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        """As the host's recorder: nothing has changed since the event before this one."""
        self.look(now_s)

    def look(self, now_s: float) -> None:
        """Count the time since the last look. Steps and loads begin at events, so that a node that
        works until some time has done so since the last look.
        """
        in_use_until_s = now_s if self._engine.has_requests() else self._engine.working_until_s
        self._kept_until_s = max(self._kept_until_s, in_use_until_s + self.plan.kept_s)
        self.used_s += max(0.0, min(now_s, self._kept_until_s) - self._looked_s)
        self._looked_s = now_s

    def _redial(self) -> None:
        self._link_id = self._links.dial(self)

    def _beat(self) -> None:
        engine_bytes = sum(m.weights_bytes + m.kv_held_bytes for m in self._engine.memory())
        base_bytes = self.plan.hello.base_bytes
        self.tell(HeartbeatDue(rss_bytes=base_bytes + engine_bytes, engine_bytes=engine_bytes))
        self._clock.call_at(self._clock.now_s() + HEARTBEAT_S, self._beat)

    # The node's ports.

    def hello(self) -> NodeHello:
        return replace(self.plan.hello, instances=self._core.instances())

    def send(self, report: NodeReport) -> None:
        if self._link_id is not None:
            self._links.report(self._link_id, report)

    def start_import(self, operation_id: OperationId, source: str) -> None:
        """A virtual node has all the models that it will ever have."""
        self._lanes.post_soon(
            ImportBroke(
                operation_id=operation_id,
                error="UnknownSource",
                message=f"a virtual node imports nothing, so not {source} either",
                hint="name the model in the scenario",
            )
        )

    def stop_import(self, operation_id: OperationId) -> None:
        """There is none."""

    def order(self, action: StartLoad, progress: Progress) -> LoadOrder:
        return LoadOrder(
            instance_id=action.instance_id,
            deployment=action.deployment,
            model=action.model,
            model_path=Path(action.model.model_id),
            kv_blocks=action.kv_blocks,
            context_tokens_max=action.context_tokens_max,
            batch_max=action.batch_max,
        )
