"""One controller and its nodes: both cores, the real performers, an engine without a model, links
that deliver when told to. All that can go wrong is a method.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from mesh.core.controller.core import ControllerCore
from mesh.domain.actions import ControllerAction, ReplyDone, ReplyError, ReplyProgress
from mesh.domain.deployment import Deployment
from mesh.domain.events import (
    CancelRequested,
    ControllerEvent,
    DrainRequested,
    InvokeRequested,
    LeaseCheckDue,
)
from mesh.domain.history import OutputHistory
from mesh.domain.ids import DeploymentName, NodeId, OperationId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import NodeCommand
from mesh.domain.model import Footprint
from mesh.domain.node_rule import NodeRule
from mesh.domain.profile import Profile
from mesh.policy.registry import policy
from mesh.runtime.controller_actions import ControllerPerformer
from mesh.runtime.host import Host
from mesh.sim.callers import Callers, MemoryRegistry
from mesh.sim.clock import HeapClock
from mesh.sim.invariants import Watch, check_engine
from tests.core.cells import FOOTPRINT, deployment, request
from tests.core.world.coverage import Coverage
from tests.core.world.node import PREFILL_TOKENS_MAX, TURN_S_MAX, WorldNode

SETTLE_STEP_S = 0.25
"""Well below every lease and pause, and coarse enough that a failing example shrinks in time."""
REST_STEP_S = 1.0
"""Once faults are over and what was under way has ended: below every lease."""
LIMITS = CellLimits(
    batch_max=4,
    kv_tokens_profiled=1024,
    kv_tokens_least=64,
    parked_s_max=5.0,
    queue_requests_max=8,
    place_retry_s=SETTLE_STEP_S,
    prefill_tokens_max=PREFILL_TOKENS_MAX,
    turn_s_max=TURN_S_MAX,
)
SHORT = OutputHistory(mean_tokens=4.0, count=50)
"""Answers so far, so that longer ones take everybody by surprise."""
EXPECTED_ERRORS = {"NotFound", "AlreadyExists", "Unavailable", "Cancelled", "TornModel"}


class World:
    """One controller and its nodes; all faults by hand."""

    def __init__(
        self,
        deployments: tuple[Deployment, ...],
        memory_bytes: Sequence[int],
        *,
        rule: str = "llm-mesh",
        profiles: tuple[Profile, ...] = (),
        footprint: Footprint = FOOTPRINT,
    ) -> None:
        """One node for each size in `memory_bytes`; `rule` is the name of the policy."""
        self.clock = HeapClock()
        self.rule = rule
        self.registry = MemoryRegistry(deployments, profiles)
        self.registry.histories = {d.spec.name: SHORT for d in deployments}
        self.operations: dict[OperationId, bool] = {}
        """Whether each has been answered."""
        self.callers = Callers(self.clock)
        self.links: dict[int, WorldNode] = {}
        self.links_made = 0
        self.epoch = 0
        self.watch = Watch()
        self.coverage = Coverage()
        self.requests_made = 0
        self.operations_made = 0
        self.start_controller()
        self.nodes = [
            WorldNode(self, f"n{n}", size, footprint) for n, size in enumerate(memory_bytes)
        ]

    def start_controller(self) -> None:
        """A new controller on the old registry: it knows deployments and profiles, nothing else."""
        self.epoch += 1
        self.core = ControllerCore(
            epoch=self.epoch,
            deployments=tuple(self.registry.deployments.values()),
            limits=LIMITS,
            policy=policy(self.rule),
            profiles=self.registry.profiles,
            histories=self.registry.histories,
            revisions=self.registry.revisions,
        )
        performer = ControllerPerformer(
            links=self,
            clients=self.callers,
            operators=self,
            registry=self.registry,
            clock=self.clock,
        )
        host: Host[ControllerEvent, ControllerAction] = Host(
            core=self.core, clock=self.clock, perform=performer.perform, recorders=(self,)
        )
        epoch = self.epoch
        self.tell: Callable[[ControllerEvent], None] = host.post
        performer.post = lambda event: host.post(event) if self.epoch == epoch else None
        self.tell(LeaseCheckDue())

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        """The controller has decided."""
        self.watch.note(self.core, event, actions)
        self.watch.look(self.core, now_s)
        self.coverage.note(self.core.cell, event)

    def seen(self) -> Counter[str]:
        """What happened, how often."""
        return self.coverage.seen + self.watch.seen

    def check_engines(self) -> None:
        """They hold no more than is tracked of them."""
        for node in self.nodes:
            entry = self.core.cell.links.get(node.link_id or 0)
            if entry is not None:
                check_engine(entry, node.engine.memory())

    def restart_controller(self) -> None:
        """Its callers get nothing more; its nodes notice that their links broke."""
        self.operations.clear()
        self.callers.cut_off(self.callers.open_ids())
        self.links.clear()
        self.start_controller()
        for node in self.nodes:
            node.drop_link()

    def invoke(
        self,
        name: DeploymentName,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        answers: int = 1,
        first: RequestId | None = None,
    ) -> RequestId:
        """One request of a call for so many answers to a prompt, or a further one after the
        `first`.
        """
        self.requests_made += 1
        request_id = RequestId(f"r{self.epoch}-{self.requests_made}")
        made = request(request_id, of=name, prompt=prompt, max_tokens=max_tokens)
        made = replace(made, answers=answers, first=first)
        self.callers.call(made, self.core.deployment(name) or deployment(name))
        self.tell(InvokeRequested(request=made))
        return request_id

    def operate(self, make: Callable[[OperationId], ControllerEvent]) -> OperationId:
        """An administrative call."""
        self.operations_made += 1
        operation_id = OperationId(f"op-{self.operations_made}")
        self.operations[operation_id] = False
        self.tell(make(operation_id))
        return operation_id

    def cancel(self, request_id: RequestId) -> None:
        self.callers.cancel(request_id)
        self.tell(CancelRequested(request_id=request_id))

    def drain(self, node_id: NodeId, *, undo: bool) -> None:
        if node_id in self.core.cell.nodes:
            self.operate(lambda op: DrainRequested(operation_id=op, node_id=node_id, undo=undo))

    def settle(self, seconds: float, step_s: float = SETTLE_STEP_S) -> None:
        """Let everything run without faults for a while."""
        for _ in range(int(seconds / step_s)):
            for node in self.nodes:
                node.connect()
                node.run_all()
            self.clock.advance(step_s)

    # What nodes do.

    def open_link(self, node: WorldNode) -> int:
        self.links_made += 1
        self.links[self.links_made] = node
        return self.links_made

    def forget_link(self, link_id: int) -> None:
        self.links.pop(link_id, None)

    # The controller's ports.

    def accept(self, link_id: int, rule: NodeRule) -> None:
        assert rule.turn_s_max == TURN_S_MAX
        if link_id in self.links:
            self.links[link_id].accepted, self.links[link_id].rule = True, rule

    def send(self, link_id: int, command: NodeCommand) -> None:
        if link_id in self.links:
            self.links[link_id].down.append(command)

    def close(self, link_id: int, *, error: str, message: str, hint: str) -> None:
        node = self.links.pop(link_id, None)
        if node is not None and node.link_id == link_id:
            node.drop_link()

    def reply(self, reply: ReplyProgress | ReplyDone | ReplyError) -> None:
        assert not self.operations[reply.operation_id], "answered twice"
        self.operations[reply.operation_id] = not isinstance(reply, ReplyProgress)
        if isinstance(reply, ReplyError):
            assert reply.error in EXPECTED_ERRORS, reply
