"""A virtual node: a machine on which agents run, one after the other.

It owns what outlasts an agent that crashed: what the machine is, what ails it, and how long it has
been in use. Before: `cluster`. After: `agent`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mesh.domain.ids import ModelId, NodeId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import NodeHello
from mesh.runtime.clock import Clock
from mesh.sim.agent import VirtualAgent
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.engine import CostEngine
from mesh.sim.links import VirtualLinks
from mesh.sim.troubles import TroubledEngine, Troubles

RESTART_S = 1.0
"""From the end of an agent that ended by itself to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """`hello` without instances; `models` that the node can load, by id."""

    hello: NodeHello
    models: Mapping[ModelId, ModelCosts]
    costs: NodeCosts = field(default_factory=NodeCosts)
    limits: NodeLimits = field(default_factory=NodeLimits)


class VirtualNode:
    def __init__(self, plan: NodePlan, *, clock: Clock, links: VirtualLinks) -> None:
        self.plan = plan
        self.troubles = Troubles()
        self._clock = clock
        self._links = links
        self._runs = 0
        self._used_s = self._computing_s = 0.0
        """Of agents that have ended."""
        self.agent = self._agent()

    def start(self) -> None:
        self.agent.start()

    def crash(self, *, silently: bool) -> None:
        """All that it held is gone. Where the machine went with the agent, nobody is told."""
        if self.agent.alive:
            self.agent.kill(silently=silently)

    def restart(self) -> None:
        """A new agent that knows nothing of the one before it, unless that one runs."""
        if self.agent.alive:
            return
        self._used_s, self._computing_s = self.used_s, self.computing_s
        self.agent = self._agent()
        self.agent.start()

    @property
    def node_id(self) -> NodeId:
        return self.plan.hello.node_id

    @property
    def used_s(self) -> float:
        """How long it has had requests, or a load under way."""
        return self._used_s + self.agent.used_s

    @property
    def computing_s(self) -> float:
        """Seconds on the compute lane."""
        return self._computing_s + self.agent.computing_s

    def _agent(self) -> VirtualAgent:
        self._runs += 1
        hello = self.plan.hello
        return VirtualAgent(
            identity=replace(hello, run_id=f"{hello.node_id}-run-{self._runs}"),
            limits=self.plan.limits,
            engine_of=self._engine,
            clock=self._clock,
            links=self._links,
            # Whatever started it starts it again, as systemd does.
            ended=lambda: self._clock.call_at(self._clock.now_s() + RESTART_S, self.restart),
        )

    def _engine(self, spend: Callable[[float], None]) -> CostEngine:
        return TroubledEngine(
            models=self.plan.models,
            costs=self.plan.costs,
            memory_bytes=self.plan.hello.memory_bytes - self.plan.hello.base_bytes,
            spend=spend,
            troubles=self.troubles,
            clock=self._clock,
        )
