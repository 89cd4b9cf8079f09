"""A whole cell in one process under a clock that the test moves: both cores, the real performers,
an engine without a model, links that deliver when told to. All that can go wrong is a method.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mesh.core.controller import ControllerCore
from mesh.core.node import NodeCore
from mesh.domain.actions import (
    ControllerAction,
    DeliverTokens,
    NodeAction,
    RefuseRequest,
    ReplyDone,
    ReplyError,
    ReplyProgress,
    StartLoad,
    TellWaiting,
)
from mesh.domain.deployment import Deployment
from mesh.domain.errors import MeshError
from mesh.domain.events import (
    CancelRequested,
    ControllerEvent,
    InvokeRequested,
    LeaseCheckDue,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
)
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.limits import CellLimits, NodeLimits
from mesh.domain.messages import NodeCommand, NodeReport
from mesh.domain.node_events import (
    CommandReceived,
    HeartbeatDue,
    ImportBroke,
    ImportFinished,
    LinkClosed,
    LinkOpened,
    NodeEvent,
)
from mesh.domain.profile import IterationShape, Profile
from mesh.domain.reasons import FinishReason, RefusalReason, TurnRule
from mesh.domain.request import Request
from mesh.domain.steps import LoadOrder, StepResult
from mesh.domain.text import TextAssets
from mesh.policy.registry import policy
from mesh.runtime.controller_actions import ControllerPerformer
from mesh.runtime.engine import Progress
from mesh.runtime.host import Host
from mesh.runtime.node_actions import Lane, NodePerformer
from tests.core.cells import FOOTPRINT, MODEL, hello, request
from tests.core.plain_engine import PlainEngine, token_at
from tests.support.profiles import FINGERPRINT

R = TypeVar("R")
TEXT = TextAssets(tokenizer_json=b"{}")
SETTLE_STEP_S = 0.25
"""Well below every lease and pause, and coarse enough that a failing example shrinks in time."""
MEASURED_S = 0.12
"""Of every shape that is measured: three times are enough, and two such instances on a node are too
many for a TPOT of 0.25 s.
"""
LIMITS = CellLimits(
    batch_max=4, kv_tokens_wanted=1024, queue_requests_max=8, place_retry_s=SETTLE_STEP_S
)
EXPECTED_ERRORS = {"NotFound", "AlreadyExists", "Unavailable", "Cancelled", "TornModel"}


class HeapClock:
    """Time moves only by `advance`."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def now_s(self) -> float:
        return self.at_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, call))

    def advance(self, by_s: float) -> None:
        until_s = self.at_s + by_s
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, call = heapq.heappop(self._heap)
            self.at_s = max(self.at_s, at_s)
            call()
        self.at_s = until_s


class QueuedLanes:
    """Engine calls wait until the test runs them, one at a time."""

    def __init__(self) -> None:
        self.waiting: dict[Lane, deque[Callable[[], None]]] = {lane: deque() for lane in Lane}
        self.post: Callable[[NodeEvent], None] = lambda event: None

    def run(
        self,
        lane: Lane,
        call: Callable[[], R],
        done: Callable[[R | MeshError], NodeEvent | None],
    ) -> None:
        def one() -> None:
            result: R | MeshError
            try:
                result = call()
            except MeshError as error:
                result = error
            event = done(result)
            if event is not None:
                self.post(event)

        self.waiting[lane].append(one)

    def post_soon(self, event: NodeEvent) -> None:
        self.post(event)

    def run_one(self, lane: Lane) -> bool:
        if not self.waiting[lane]:
            return False
        self.waiting[lane].popleft()()
        return True


class World:
    """One controller and its nodes; all faults by hand."""

    def __init__(
        self,
        deployments: tuple[Deployment, ...],
        memory_bytes: Sequence[int],
        *,
        rule: str = "llm-mesh",
        profiles: tuple[Profile, ...] = (),
    ) -> None:
        """One node for each size in `memory_bytes`; `rule` is the name of the policy."""
        self.clock = HeapClock()
        self.rule = rule
        self.deployments = deployments
        self.profiles = profiles
        self.operations: dict[OperationId, bool] = {}
        """Whether each has been answered."""
        self.clients: dict[RequestId, Client] = {}
        self.links: dict[int, WorldNode] = {}
        self.links_made = 0
        self.epoch = 0
        self.requests_made = 0
        self.operations_made = 0
        self.start_controller()
        self.nodes = [WorldNode(self, f"n{n}", size) for n, size in enumerate(memory_bytes)]

    def start_controller(self) -> None:
        """A new controller on the old registry: it knows deployments and profiles, nothing else."""
        self.epoch += 1
        self.core = ControllerCore(
            epoch=self.epoch,
            deployments=self.deployments,
            limits=LIMITS,
            policy=policy(self.rule),
            profiles=self.profiles,
        )
        performer = ControllerPerformer(
            links=self, clients=self, operators=self, registry=self, clock=self.clock
        )
        host: Host[ControllerEvent, ControllerAction] = Host(
            core=self.core, clock=self.clock, perform=performer.perform
        )
        epoch = self.epoch
        self.tell = host.post
        performer.post = lambda event: host.post(event) if self.epoch == epoch else None
        self.tell(LeaseCheckDue())

    def restart_controller(self) -> None:
        """Its callers get nothing more; its nodes notice that their links broke."""
        self.operations.clear()
        for client in self.clients.values():
            client.gone = True
        self.links.clear()
        self.start_controller()
        for node in self.nodes:
            node.drop_link()

    def invoke(self, name: DeploymentName, prompt: tuple[int, ...], max_tokens: int) -> RequestId:
        self.requests_made += 1
        request_id = RequestId(f"r{self.epoch}-{self.requests_made}")
        made = request(request_id, of=name, prompt=prompt, max_tokens=max_tokens)
        self.clients[request_id] = Client(made)
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
        self.clients[request_id].gone = True
        self.tell(CancelRequested(request_id=request_id))

    # The controller's ports.

    def accept(self, link_id: int, turns: TurnRule) -> None:
        if link_id in self.links:
            self.links[link_id].accepted, self.links[link_id].turns = True, turns

    def send(self, link_id: int, command: NodeCommand) -> None:
        if link_id in self.links:
            self.links[link_id].down.append(command)

    def close(self, link_id: int, *, error: str, message: str, hint: str) -> None:
        node = self.links.pop(link_id, None)
        if node is not None and node.link_id == link_id:
            node.drop_link()

    def waiting(self, told: TellWaiting) -> None:
        assert not self.clients[told.request_id].ended

    def deliver(self, tokens: DeliverTokens) -> None:
        self.clients[tokens.outputs.request_id].take(tokens)

    def refuse(self, refusal: RefuseRequest) -> None:
        self.clients[refusal.request_id].refused(refusal.reason)

    def reply(self, reply: ReplyProgress | ReplyDone | ReplyError) -> None:
        assert not self.operations[reply.operation_id], "answered twice"
        self.operations[reply.operation_id] = not isinstance(reply, ReplyProgress)
        if isinstance(reply, ReplyError):
            assert reply.error in EXPECTED_ERRORS, reply

    def store(self, deployment: Deployment, text: TextAssets | None) -> None:
        others = tuple(d for d in self.deployments if d.spec.name != deployment.spec.name)
        self.deployments = (*others, deployment)

    def remove(self, name: DeploymentName) -> None:
        self.deployments = tuple(d for d in self.deployments if d.spec.name != name)

    def store_profile(self, profile: Profile) -> None:
        key = (profile.model_id, profile.fingerprint)
        others = tuple(p for p in self.profiles if (p.model_id, p.fingerprint) != key)
        self.profiles = (*others, profile)

    def settle(self, seconds: float) -> None:
        """Let everything run without faults for a while."""
        for _ in range(int(seconds / SETTLE_STEP_S)):
            for node in self.nodes:
                node.connect()
                node.run_all()
            self.clock.advance(SETTLE_STEP_S)


class Client:
    """Checks what it is told as it is told."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.ended = False
        self.gone = False
        self.reason: RefusalReason | FinishReason | None = None

    def take(self, told: DeliverTokens) -> None:
        assert not self.gone, "told after it was cancelled"
        assert not self.ended, "told after its end"
        outputs = told.outputs
        assert outputs.first_index == len(self.tokens), "a token was lost or came twice"
        self.tokens.extend(outputs.token_ids)
        expected = [token_at(self.request.prompt_tokens, i) for i in range(len(self.tokens))]
        assert self.tokens == expected
        if outputs.finish is not None:
            assert len(self.tokens) == self.request.sampling.max_tokens
            self.ended, self.reason = True, outputs.finish

    def refused(self, reason: RefusalReason) -> None:
        assert not self.gone
        assert not self.ended, "ended twice"
        self.ended, self.reason = True, reason


class WorldEngine(PlainEngine):
    """Never asked to compute for nobody, nor to measure beside a request."""

    def step(self, instance_id: InstanceId, prefill_tokens_max: int) -> StepResult:
        assert self.held().get(instance_id), "a step of an instance without work"
        return super().step(instance_id, prefill_tokens_max)

    def measure(self, instance_id: InstanceId, shape: IterationShape) -> float:
        assert not any(self.held().values()), "a measurement goes before a request"
        super().measure(instance_id, shape)
        return MEASURED_S


class WorldNode:
    """A node's agent: its core, engine, lanes and link."""

    def __init__(self, world: World, name: str, memory_bytes: int) -> None:
        self.world = world
        self.name = name
        self.fingerprint = FINGERPRINT if name == "n0" else "test/other"
        self.memory_bytes = memory_bytes
        self.runs = 0
        self.link_id: int | None = None
        self.accepted = self.welcomed = False
        self.turns = TurnRule.HEADROOM
        self.start()

    def start(self) -> None:
        self.runs += 1
        self.down: deque[NodeCommand] = deque()
        self.up: deque[NodeReport] = deque()
        self.engine = WorldEngine(self.memory_bytes)
        self.lanes = QueuedLanes()
        self.core = NodeCore(limits=NodeLimits(prefill_tokens_max=64))
        performer = NodePerformer(engine=self.engine, lanes=self.lanes, link=self, models=self)
        host: Host[NodeEvent, NodeAction] = Host(
            core=self.core, clock=self.world.clock, perform=performer.perform
        )
        self.tell = host.post
        self.lanes.post = host.post

    def core_id(self) -> NodeId:
        return NodeId(self.name)

    def connect(self) -> None:
        self.dial()
        self.welcome()

    def dial(self) -> None:
        """Say hello; the welcome is on its way."""
        if self.link_id is not None:
            return
        self.accepted = self.welcomed = False
        self.world.links_made += 1
        self.link_id = self.world.links_made
        self.world.links[self.link_id] = self
        said = replace(
            hello(
                self.name,
                run_id=f"run-{self.runs}",
                memory_bytes=self.memory_bytes,
                fingerprint=self.fingerprint,
            ),
            instances=self.core.instances(),
        )
        self.world.tell(NodeConnected(link_id=self.link_id, hello=said))

    def welcome(self) -> None:
        """The welcome arrives, before any command."""
        if self.link_id is not None and self.accepted and not self.welcomed:
            self.welcomed = True
            self.tell(LinkOpened(turns=self.turns))

    def break_link(self) -> None:
        """Both ends notice; what was on its way is lost."""
        if self.link_id is not None:
            link_id = self.link_id
            self.drop_link()
            self.world.links.pop(link_id, None)
            self.world.tell(NodeDisconnected(link_id=link_id, reason="broken"))

    def drop_link(self) -> None:
        self.link_id = None
        self.down.clear()
        self.up.clear()
        if self.welcomed:
            self.welcomed = False
            self.tell(LinkClosed(reason="broken"))

    def crash(self, *, noticed: bool) -> None:
        """Killed: all that it held is gone; it starts again empty. When its machine went with it,
        the controller does not notice.
        """
        link_id, self.link_id = self.link_id, None
        self.start()
        if link_id is not None:
            self.world.links.pop(link_id, None)
        if link_id is not None and noticed:
            self.world.tell(NodeDisconnected(link_id=link_id, reason="crashed"))

    def deliver_up(self) -> bool:
        if not self.up or self.link_id is None:
            return False
        self.world.tell(NodeReported(link_id=self.link_id, report=self.up.popleft()))
        return True

    def deliver_down(self) -> bool:
        if not self.down:
            return False
        self.welcome()
        self.tell(CommandReceived(command=self.down.popleft()))
        return True

    def heartbeat(self) -> None:
        self.tell(HeartbeatDue(rss_bytes=1))

    def run_all(self) -> None:
        self.heartbeat()
        while (
            self.deliver_down()
            or self.lanes.run_one(Lane.COMPUTE)
            or self.lanes.run_one(Lane.LOADING)
            or self.deliver_up()
        ):
            pass

    # The node's ports.

    def send(self, report: NodeReport) -> None:
        if self.link_id is not None:
            self.up.append(report)

    def start_import(self, operation_id: OperationId, source: str) -> None:
        def done(result: MeshError | None) -> NodeEvent:
            if self.engine.fail_loads:
                self.engine.fail_loads -= 1
                return ImportBroke(
                    operation_id=operation_id, error="TornModel", message="as told", hint=""
                )
            return ImportFinished(
                operation_id=operation_id, model=MODEL, footprint=FOOTPRINT, text=TEXT
            )

        self.lanes.run(Lane.LOADING, lambda: None, done)

    def stop_import(self, operation_id: OperationId) -> None:
        """It ends all the same, and nobody is told."""

    def order(self, action: StartLoad, progress: Progress) -> LoadOrder:
        progress("load", 0.5)
        return LoadOrder(
            instance_id=action.instance_id,
            deployment=action.deployment,
            model=action.model,
            model_path=Path("none"),
            kv_blocks=action.kv_blocks,
            context_tokens_max=action.context_tokens_max,
            batch_max=action.batch_max,
        )
