"""What `prism` decides in a small cell: where models are, when idle ones go, and who moves."""

from dataclasses import replace

import pytest

from mesh.domain.actions import ControllerAction
from mesh.domain.deployment import Scaling
from mesh.domain.events import LeaseCheckDue
from mesh.domain.ids import NodeId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import LoadInstance, NodeHello, SubmitRequest, UnloadInstance
from mesh.domain.reasons import DeviceKind
from mesh.policy.prism import PRISM, TARGET
from tests.core.admission import instance, node
from tests.core.cells import MIB, CellUnderTest, commands, only, request
from tests.policy.test_mesh import anywhere


def gpu(name: str, *there: str, memory_bytes: int = 1024 * MIB) -> NodeHello:
    reports = (replace(instance(f"{name}-{of}", of), kv_blocks=16) for of in there)
    return replace(node(name, *reports, memory_bytes=memory_bytes), device=DeviceKind.GPU)


class Cell(CellUnderTest):
    def __init__(self, *nodes: NodeHello, b_max: int = 4) -> None:
        limits = CellLimits(delivery_s_max=0.02, node_lease_s=1000.0)
        a, b, c = (anywhere(name) for name in "abc")
        b = replace(b, spec=replace(b.spec, scaling=Scaling(replicas_max=b_max)))
        super().__init__(a, b, c, limits=limits, rule="prism")
        self.links = {hello.node_id: self.join(hello)[0] for hello in nodes}

    def ask(self, name: str, of: str) -> list[ControllerAction]:
        return self.invoke(request(name, of=of, prompt=(1,) * 100, max_tokens=100))

    def loads_on(self, actions: list[ControllerAction]) -> NodeId:
        load = only(commands(actions, LoadInstance), LoadInstance)
        return self.core.cell.instances[load.instance_id].node.node_id


def test_a_model_starts_where_the_pressure_on_kv_memory_is_least() -> None:
    cell = Cell(gpu("n1", "a"), gpu("n2", "b"))
    for n in range(4):
        cell.ask(f"r{n}", of="a")
    cell.ask("r4", of="b")
    assert cell.loads_on(cell.ask("r5", of="c")) == "n2"


def test_an_idle_model_goes_for_another_one_only_after_the_threshold() -> None:
    cell = Cell(gpu("n1", "a", memory_bytes=150 * MIB))
    cell.now_s += PRISM.idle_s_min - 0.1
    assert not commands(cell.ask("r1", of="b"), LoadInstance)
    assert not commands(cell.tell(LeaseCheckDue()), UnloadInstance)
    cell.now_s += 0.2
    gone = only(commands(cell.tell(LeaseCheckDue()), UnloadInstance), UnloadInstance)
    assert gone.instance_id == "n1-a"


def test_a_model_moves_to_a_node_of_far_less_pressure_and_serves_until_it_is_loaded_there() -> None:
    cell = Cell(gpu("n1", "a", "b"), gpu("n2"))
    cell.ask("r1", of="a")
    cell.ask("r2", of="b")
    actions = cell.tell(LeaseCheckDue())
    load = only(commands(actions, LoadInstance), LoadInstance)
    target = cell.core.cell.instances[load.instance_id]
    assert (cell.loads_on(actions), load.deployment) == ("n2", "b")
    assert target.label.startswith(TARGET)
    cell.tokens(cell.links[NodeId("n1")], "r2", (7,))
    cell.loaded(cell.links[NodeId("n2")], load.instance_id)
    moved = only(commands(cell.tell(LeaseCheckDue()), SubmitRequest), SubmitRequest)
    assert (moved.order.request.request_id, moved.instance_id) == ("r2", load.instance_id)


def test_the_models_stay_where_a_move_would_gain_little() -> None:
    cell = Cell(gpu("n1", "a"), gpu("n2", "b"))
    cell.ask("r1", of="a")
    cell.ask("r2", of="b")
    assert not commands(cell.tell(LeaseCheckDue()), LoadInstance)


def test_a_move_that_does_not_come_about_is_given_up_and_stops_no_other() -> None:
    cell = Cell(gpu("n1", "a", "b"), gpu("n2"))
    cell.ask("r1", of="a")
    cell.ask("r2", of="b")
    load = only(commands(cell.tell(LeaseCheckDue()), LoadInstance), LoadInstance)
    target = cell.core.cell.instances[load.instance_id]
    cell.now_s += PRISM.target_s_max - 1.0
    assert not commands(cell.tell(LeaseCheckDue()), LoadInstance)
    assert target.label
    cell.now_s += 2.0
    cell.tell(LeaseCheckDue())
    assert not target.label


@pytest.mark.parametrize(("b_max", "moves"), [(1, "c"), (2, "b")])
def test_a_model_that_may_have_one_instance_does_not_move_and_another_does(
    b_max: int, moves: str
) -> None:
    cell = Cell(gpu("n1", "a", "b", "c"), gpu("n2"), b_max=b_max)
    for name in "abc":
        cell.ask(f"r-{name}", of=name)
    load = only(commands(cell.tell(LeaseCheckDue()), LoadInstance), LoadInstance)
    assert load.deployment == moves
