"""What a policy has move or go: live where all that runs there has a place, and not too often."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.events import LeaseCheckDue
from mesh.domain.ids import InstanceId, NodeId, RequestId
from mesh.domain.lifecycle import InstanceState
from mesh.domain.messages import NodeHello, RequestReturned, SubmitRequest, UnloadInstance
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.plans import Move, Plan, Release
from mesh.policy.views import CellView
from tests.core.admission import instance, node
from tests.core.cells import MIB, commands, only, request
from tests.core.two_nodes import LIMITS, TARGET, TwoNodes, continued


class Releasing:
    """`llm-mesh` that has the instance on node n1 go."""

    def __getattr__(self, name: str) -> Any:
        return getattr(LLM_MESH, name)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        yield from (Release(instance=i) for i in cell.instances() if i.instance_id == "i1")


B1, B2 = InstanceId("b1"), InstanceId("b2")


class Crowding(Releasing):
    """The same once what runs on node n3 moves to where that of n1 would go."""

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        named = {instance.instance_id: instance for instance in cell.instances()}
        yield Move(requests=tuple(cell.requests(named[B1])), to=named[B2])
        yield from super().upkeep(cell)


class Moving(Releasing):
    """`llm-mesh` that has what runs on node n1 move, again and again."""

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        to = next(i for i in cell.instances() if i.instance_id == "i2")
        running = [r for i in cell.instances() if i is not to for r in cell.requests(i)]
        yield Move(requests=tuple(running), to=to)


ONE_PLACE = node("n2", replace(instance("i2", "a"), batch_max=1))
SIXTEEN_BLOCKS = node("n2", replace(instance("i2", "a"), kv_blocks=16), memory_bytes=116 * MIB)
"""The instance has 16 blocks, of which a request takes 7."""
QUICK = Slo(ttft_s=0.035, ttft_tokens_per_s=1e6)
"""The time in which a prompt is computed, but not two of them."""


def test_an_instance_that_a_policy_has_go_goes_once_what_runs_on_it_has_moved() -> None:
    cell = TwoNodes(policy=Releasing(), beside=("r2",))
    begun = cell.tell(LeaseCheckDue())
    orders = [command.order for command in commands(begun, SubmitRequest)]
    assert [(order.request.request_id, order.held) for order in orders] == [
        ("r1", True),
        ("r2", True),
    ]
    assert cell.core.cell.instances[InstanceId("i1")].state is InstanceState.DRAINING
    cell.computed()
    cell.yielded()
    assert not commands(cell.drawn(44), UnloadInstance), "r2 runs there"
    over = cell.yielded(of="r2", finish=FinishReason.STOP)
    assert only(commands(over, UnloadInstance), UnloadInstance).instance_id == "i1"


def test_it_goes_at_once_where_its_requests_cannot_move_live() -> None:
    cell = TwoNodes(policy=Releasing(), to=replace(TARGET, computes_ahead=False))
    said = cell.tell(LeaseCheckDue())
    assert only(commands(said, UnloadInstance), UnloadInstance).instance_id == "i1"
    assert not only(commands(said, SubmitRequest), SubmitRequest).order.held


def test_of_more_than_may_move_at_a_time_none_begins_to() -> None:
    cell = TwoNodes(policy=Releasing(), beside=("r2",), limits=replace(LIMITS, migrations_max=1))
    orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
    assert [order.held for order in orders] == [False, False]


@pytest.mark.parametrize(("most", "move"), [(3, True), (2, False)])
def test_what_moves_to_a_node_already_counts_with_all_that_would(most: int, move: bool) -> None:
    """From another node, to an instance of another deployment."""
    limits = replace(LIMITS, migrations_max=most)
    to = node("n2", *TARGET.instances, instance(B2, "b"))
    cell = TwoNodes(policy=Crowding(), to=to, beside=("r2",), limits=limits)
    other, _ = cell.join(node("n3", instance(B1, "b")))
    cell.invoke(request("r3", of="b", prompt=(1,) * 100, max_tokens=100))
    cell.tokens(other, "r3", (40, 41, 42))
    orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
    held = [order.request.request_id for order in orders if order.held]
    assert held == (["r3", "r1", "r2"] if move else ["r3"])


@pytest.mark.parametrize(
    ("to", "slo", "policy"),
    [
        (ONE_PLACE, None, Releasing()),
        (SIXTEEN_BLOCKS, None, Releasing()),
        (TARGET, QUICK, Releasing()),
    ],
    ids=["places", "memory", "time"],
)
def test_where_not_all_of_an_instance_have_a_place_none_moves_and_no_move_counts(
    to: NodeHello, slo: Slo | None, policy: Releasing
) -> None:
    """There is what the first of them needs, and not what all need together: where they could move
    at once, they do that.
    """
    alone = TwoNodes(policy=policy, to=to, slo=slo)
    assert only(commands(alone.tell(LeaseCheckDue()), SubmitRequest), SubmitRequest).order.held
    cell = TwoNodes(policy=policy, to=to, slo=slo, beside=("r2", "r3"))
    for _ in range(3):
        orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
        assert not any(order.held for order in orders)
    assert [request.moves for request in cell.core.cell.requests.values()] == [0, 0, 0]


def test_a_policy_has_a_request_move_no_more_often_than_it_may() -> None:
    cell = TwoNodes(policy=Moving(), limits=replace(LIMITS, moves_max=2))
    for attempt, moves in ((2, 1), (3, 2), (4, 2)):
        cell.tell(LeaseCheckDue())
        refused = RequestReturned(
            request_id=RequestId("r1"), attempt=attempt, error="EngineError", message="no"
        )
        cell.report(cell.target, refused)
        assert cell.core.cell.requests[RequestId("r1")].moves == moves


def test_from_where_weights_are_swapped_a_request_goes_on_elsewhere_at_once() -> None:
    cell = TwoNodes(policy=Releasing())
    cell.core.cell.nodes[NodeId("n1")].station.pools = True
    cell.tell(LeaseCheckDue())
    assert not continued(cell.computed()).held, "its source may have no token for seconds"
    assert cell.runs_on == "i2"
