"""A virtual node: a machine on which agents run, one after the other.

It owns what outlasts an agent that crashed: what the machine is, what ails it, and how long it has
been in use. Before: `cluster`. After: `agent`.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from mesh.domain.energy import Power
from mesh.domain.ids import ModelId, NodeId, RequestId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import NodeHello
from mesh.domain.values import dataclass
from mesh.policy.rules.turns import TurnRule, name_of
from mesh.runtime.clock import Clock
from mesh.runtime.node_actions import Lane
from mesh.sim.agent import VirtualAgent
from mesh.sim.costs import ModelCosts, NodeCosts
from mesh.sim.engine import CostEngine
from mesh.sim.engine_faults import EngineFaults, FaultyEngine
from mesh.sim.kv_links import VirtualKvLinks
from mesh.sim.links import VirtualLinks

RESTART_S = 1.0
"""From the end of an agent that ended by itself to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """`hello` without instances; `models` that the node can load, by id."""

    hello: NodeHello
    models: Mapping[ModelId, ModelCosts]
    costs: NodeCosts = field(default_factory=NodeCosts)
    limits: NodeLimits = field(default_factory=NodeLimits)
    kept_s: float = 0.0
    """It counts as busy for so long after its last request, step or load."""
    weights_use: bool = False
    """It counts as in use while it holds an instance, not only while it is busy."""
    seed: int = 0
    """The seed of what is drawn at random on the node, beside its name."""
    power: Power | None = None
    comes_s: float | None = None
    """It comes so long after it is wanted, and goes again; infinite: it never comes. None: it is
    there from the beginning.
    """


class VirtualNode:
    """`lengths` are those of answers that its engines alone know, beside who asked for them."""

    def __init__(
        self,
        plan: NodePlan,
        *,
        clock: Clock,
        links: VirtualLinks,
        kv_links: VirtualKvLinks,
        lengths: Mapping[RequestId, int],
        own_rule: TurnRule | None = None,
    ) -> None:
        self.plan = plan
        self._lengths = lengths
        self._own_rule = own_rule
        self._drawn = random.Random(f"{plan.seed} {plan.costs.jitter.seed} {plan.hello.node_id}")
        self.engine_faults = EngineFaults()
        self._clock = clock
        self._links = links
        self._kv_links = kv_links
        self._runs = 0
        self._computed_s = 0.0
        """By agents that have ended."""
        self.busy_s = 0.0
        """How long it has had requests, a step or a load, and `kept_s` after."""
        self.used_s = 0.0
        """How long it has been in use: busy, or with an instance where `weights_use` says so."""
        self._looked_s = clock.now_s()
        self._kept_until_s = -math.inf
        self.agent = self._agent()

    def start(self) -> None:
        """One that comes only when it is wanted is not there yet."""
        if self.plan.comes_s is None:
            self.agent.start()
        else:
            self.agent.kill(silently=False)

    def crash(self, *, silently: bool) -> None:
        """All that it held is gone. Where the machine went with the agent, nobody is told."""
        if self.agent.alive:
            now_s = self._clock.now_s()
            self.look(now_s)
            self.agent.kill(silently=silently)
            # The load or step that was to keep it in use has gone as well.
            self._kept_until_s = min(self._kept_until_s, now_s)

    def restart(self) -> None:
        """A new agent that knows nothing of the one before it, unless that one runs."""
        before = self.agent
        if before.alive:
            return
        self.look(self._clock.now_s())
        self._computed_s = self.computing_s
        self.agent = self._agent()
        self.engine.count_on(before.engine)
        self.agent.start()

    @property
    def node_id(self) -> NodeId:
        return self.plan.hello.node_id

    @property
    def engine(self) -> CostEngine:
        """For those who look at it from outside: what it holds, and what it has done."""
        return self.agent.engine

    @property
    def computing_s(self) -> float:
        """Seconds on the compute lane."""
        return self._computed_s + self.agent.lanes.busy_s[Lane.COMPUTE]

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        """As its agents' recorder: nothing has changed since the event before this one."""
        self.look(now_s)

    def look(self, now_s: float) -> None:
        """Count the time since the last look. Steps and loads begin at events, so that a node that
        works until some time has done so since the last look.
        """
        engine = self.agent.engine
        busy_until_s = now_s if engine.has_requests() else engine.working_until_s
        self._kept_until_s = max(self._kept_until_s, busy_until_s + self.plan.kept_s)
        busy_s = max(0.0, min(now_s, self._kept_until_s) - self._looked_s)
        in_use = self.plan.weights_use and engine.has_instances()
        self.busy_s += busy_s
        self.used_s += now_s - self._looked_s if in_use else busy_s
        self._looked_s = now_s

    def _agent(self) -> VirtualAgent:
        self._runs += 1
        hello = self.plan.hello
        return VirtualAgent(
            identity=replace(
                hello,
                run_id=f"{hello.node_id}-run-{self._runs}",
                rule_digest=name_of(self._own_rule).digest if self._own_rule else "",
            ),
            own_rule=self._own_rule,
            power=self.plan.power,
            limits=self.plan.limits,
            engine_of=self._engine_of,
            recorder=self,
            clock=self._clock,
            links=self._links,
            kv_links=self._kv_links,
            # Whatever started it starts it again, as systemd does.
            ended=lambda: self._clock.call_at(self._clock.now_s() + RESTART_S, self.restart),
        )

    def _engine_of(self, spend: Callable[[float], None]) -> CostEngine:
        return FaultyEngine(
            models=self.plan.models,
            costs=self.plan.costs,
            memory_bytes=self.plan.hello.memory_bytes - self.plan.hello.base_bytes,
            spend=spend,
            engine_faults=self.engine_faults,
            clock=self._clock,
            lengths=self._lengths,
            drawn=self._drawn,
        )
