"""A node of the world: connected, cut off, crashed and started again as the test says.

Commands and reports wait on the link, and calls in the lanes, until the test lets them through.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction
from mesh.domain.errors import MeshError
from mesh.domain.events import ControllerEvent, NodeConnected, NodeDisconnected, NodeReported
from mesh.domain.ids import NodeId, OperationId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import ImportDone, ImportFailed, NodeCommand, NodeReport
from mesh.domain.model import Footprint, WeightPrecision
from mesh.domain.node_events import CommandReceived, HeartbeatDue, LinkClosed, LinkOpened, NodeEvent
from mesh.domain.node_rule import CELL_RULE
from mesh.domain.text import TextAssets
from mesh.runtime.host import Host
from mesh.runtime.node_actions import Lane, NodePerformer
from mesh.sim.clock import HeapClock
from mesh.sim.kv_links import VirtualKvLinks
from mesh.sim.lanes import VirtualLanes
from tests.core.cells import FOOTPRINT, MODEL, OTHER_MODEL, hello
from tests.core.world.coverage import Coverage
from tests.core.world.engine import StrictEngine
from tests.support.profiles import FINGERPRINT
from tests.support.scripted_engine import ModelsAtHand

TEXT = TextAssets(tokenizer_json=b"{}")


class Controller(Protocol):
    """The other end of a node's link."""

    clock: HeapClock
    tell: Callable[[ControllerEvent], None]
    coverage: Coverage

    def open_link(self, node: "WorldNode") -> int:
        """The id of a new link, over which the controller reaches the node from now on."""
        ...

    def forget_link(self, link_id: int) -> None:
        """Nothing comes over it any more."""
        ...


PREFILL_TOKENS_MAX = 64
TURN_S_MAX = 0.0035
"""Two or three decodes of a small batch."""


class WorldNode(ModelsAtHand):
    """A node's agent: its core, engine, lanes and link."""

    def __init__(
        self, controller: Controller, name: str, memory_bytes: int, footprint: Footprint = FOOTPRINT
    ) -> None:
        """Instances share weights where their footprint says so."""
        self.controller = controller
        self.name = name
        self.fingerprint = FINGERPRINT if name == "n0" else "test/other"
        self.memory_bytes = memory_bytes
        self.footprint = footprint
        self.runs = 0
        self.link_id: int | None = None
        self.accepted = self.welcomed = False
        self.rule = CELL_RULE
        self.start()

    def start(self) -> None:
        self.runs += 1
        self.down: deque[NodeCommand] = deque()
        self.up: deque[NodeReport] = deque()
        self.engine = StrictEngine(self.memory_bytes, self.footprint)
        self.lanes = VirtualLanes(self.controller.clock, by_hand=True)
        limits = NodeLimits(prefill_tokens_max=PREFILL_TOKENS_MAX)
        self.core = NodeCore(limits=limits)
        kv = VirtualKvLinks(self.controller.clock).add(self.core_id(), 1e9, self.engine)
        performer = NodePerformer(
            engine=self.engine, lanes=self.lanes, link=self, models=self, kv=kv
        )
        host: Host[NodeEvent, NodeAction] = Host(
            core=self.core,
            clock=self.controller.clock,
            perform=performer.perform,
            recorders=(self,),
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
        self.link_id = self.controller.open_link(self)
        said = replace(
            hello(
                self.name,
                run_id=f"run-{self.runs}",
                memory_bytes=self.memory_bytes,
                fingerprint=self.fingerprint,
            ),
            instances=self.core.instances(),
            prefetch_bytes=self.memory_bytes // 2,
            shares_weights=self.footprint.shared_bytes > 0,
        )
        self.controller.tell(NodeConnected(link_id=self.link_id, hello=said))

    def welcome(self) -> None:
        """The welcome arrives, before any command."""
        if self.link_id is not None and self.accepted and not self.welcomed:
            self.welcomed = True
            self.tell(LinkOpened(rule=self.rule))

    def break_link(self) -> None:
        """Both ends notice; what was on its way is lost."""
        if self.link_id is not None:
            link_id = self.link_id
            self.drop_link()
            self.controller.forget_link(link_id)
            self.controller.tell(NodeDisconnected(link_id=link_id, reason="broken"))

    def drop_link(self) -> None:
        self.link_id = None
        self.down.clear()
        self.up.clear()
        if self.welcomed:
            self.welcomed = False
            self.tell(LinkClosed(reason="broken"))

    def crash(self, *, noticed: bool) -> None:
        """The node is killed: all that it held is gone, and it starts again empty. When its machine
        went with it, the controller does not notice.
        """
        link_id, self.link_id = self.link_id, None
        self.start()
        if link_id is not None:
            self.controller.forget_link(link_id)
        if link_id is not None and noticed:
            self.controller.tell(NodeDisconnected(link_id=link_id, reason="crashed"))

    def deliver_up(self) -> bool:
        if not self.up or self.link_id is None:
            return False
        self.controller.tell(NodeReported(link_id=self.link_id, report=self.up.popleft()))
        return True

    def deliver_down(self) -> bool:
        if not self.down:
            return False
        self.welcome()
        self.tell(CommandReceived(command=self.down.popleft()))
        return True

    def heartbeat(self) -> None:
        self.tell(HeartbeatDue(rss_bytes=1))

    def load(self) -> bool:
        """The next call of a load; False when none waits."""
        return self.lanes.run_one(Lane.LOADING) or self.lanes.run_one(Lane.WAKING)

    def run_all(self) -> None:
        self.heartbeat()
        while (
            self.deliver_down()
            or self.lanes.run_one(Lane.COMPUTE)
            or self.load()
            or self.deliver_up()
        ):
            pass

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        self.controller.coverage.seen["node events"] += 1

    # The node's ports.

    def send(self, report: NodeReport) -> None:
        if self.link_id is not None:
            self.up.append(report)

    def start_import(
        self, operation_id: OperationId, source: str, weights: WeightPrecision | None
    ) -> None:
        def done(result: MeshError | None) -> NodeEvent:
            if self.engine.script.fails("fail_loads"):
                return ImportFailed(
                    operation_id=operation_id, error="TornModel", message="as told", hint=""
                )
            model = MODEL if source == MODEL.source else OTHER_MODEL
            return ImportDone(
                operation_id=operation_id, model=model, footprint=self.footprint, text=TEXT
            )

        self.lanes.run(Lane.LOADING, lambda: None, done)

    def stop_import(self, operation_id: OperationId) -> None:
        """It ends all the same, and nobody is told."""
