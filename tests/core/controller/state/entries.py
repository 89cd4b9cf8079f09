"""A cell of one node with one instance, entered by hand: state without a core that decides."""

from dataclasses import replace

from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.lifecycle import DeploymentState, InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.node_rule import CELL_RULE
from mesh.domain.slo import Slo
from mesh.memory.station import ReservationStation
from mesh.policy.guarded import Guarded
from mesh.policy.registry import policy
from mesh.request.candidates import Candidates
from tests.core.cells import FOOTPRINT, MODEL, deployment, hello, request
from tests.support.profiles import PROFILE

POLICY = Guarded(policy("llm-mesh"), CellLimits())
A = DeploymentName("a")


class Entries:
    def __init__(self) -> None:
        self.cell = Cell()
        self.deployment = self.a_deployment()
        self.node = self.a_node("n1", 1)
        self.instance = self.an_instance("a1", self.node)

    def a_deployment(self) -> DeploymentEntry:
        stored = deployment(A)
        entry = DeploymentEntry(
            spec=stored.spec,
            state=DeploymentState.READY,
            candidates=Candidates(POLICY.instance_rank),
            deployment=stored,
        )
        self.cell.add_deployment(entry)
        return entry

    def a_node(self, name: str, link_id: int) -> NodeEntry:
        node = NodeEntry(
            hello=hello(name),
            link_id=link_id,
            rule=CELL_RULE,
            station=ReservationStation(capacity_bytes=hello().memory_bytes),
            last_seen_s=0.0,
        )
        self.cell.add_node(node)
        return node

    def an_instance(self, name: str, node: NodeEntry) -> InstanceEntry:
        instance = InstanceEntry(
            instance_id=InstanceId(name),
            deployment=A,
            model_id=MODEL.model_id,
            node=node,
            state=InstanceState.READY,
            footprint=FOOTPRINT,
            profile=PROFILE,
            kv_blocks=16,
            context_tokens_max=512,
            batch_max=4,
        )
        self.cell.add_instance(instance)
        return instance

    def a_request(
        self, name: str = "r1", *, tokens: int = 3, arrival_s: float = 0.0, answers: int = 1
    ) -> RequestEntry:
        original = replace(request(name, of=A, prompt=range(tokens)), answers=answers)
        entry = RequestEntry(original=original, slo=Slo(), arrival_s=arrival_s)
        self.cell.add_request(entry)
        return entry

    def context(self) -> EventContext:
        return EventContext(
            cell=self.cell,
            epoch=1,
            limits=CellLimits(),
            policy=POLICY,
            now_s=5.0,
            validations_left=9,
        )


def submit(instance: InstanceEntry, request: RequestEntry, now_s: float = 5.0) -> None:
    instance.add(request, blocks=2, now_s=now_s)
