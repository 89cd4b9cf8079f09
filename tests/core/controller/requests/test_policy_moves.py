"""Moves that a policy asks for, and moves of KV blocks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.events import LeaseCheckDue
from mesh.domain.ids import InstanceId, NodeId, RequestId
from mesh.domain.lifecycle import InstanceState, MigrationState
from mesh.domain.messages import (
    KvArrived,
    NodeHello,
    OfferKv,
    RequestReturned,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from mesh.policy.llm_mesh import LLM_MESH
from mesh.policy.plans import Carry, Move, Plan, Release
from mesh.policy.views import CellView
from tests.core.admission import instance, node
from tests.core.cells import MIB, commands, only, request
from tests.core.controller.test_policy_faults import Other
from tests.core.two_nodes import LIMITS, TARGET, TwoNodes


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
    assert [(order.request.request_id, order.paused) for order in orders] == [
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
    assert not only(commands(said, SubmitRequest), SubmitRequest).order.paused


def test_of_more_than_may_move_at_a_time_none_begins_to() -> None:
    cell = TwoNodes(policy=Releasing(), beside=("r2",), limits=replace(LIMITS, migrations_max=1))
    orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
    assert [order.paused for order in orders] == [False, False]


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
    held = [order.request.request_id for order in orders if order.paused]
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
    assert only(commands(alone.tell(LeaseCheckDue()), SubmitRequest), SubmitRequest).order.paused
    cell = TwoNodes(policy=policy, to=to, slo=slo, beside=("r2", "r3"))
    for _ in range(3):
        orders = [command.order for command in commands(cell.tell(LeaseCheckDue()), SubmitRequest)]
        assert not any(order.paused for order in orders)
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


def end(name: str, on: str, bytes_per_s: float = 1e12, kv_format: str = "f") -> NodeHello:
    hello = node(name, instance(on, "a"))
    return replace(hello, kv_address=f"{name}:1", kv_format=kv_format, kv_bytes_per_s=bytes_per_s)


class Linked(TwoNodes):
    """Both nodes hand KV blocks out; 103 tokens of `r1` are three whole blocks and a part."""

    def __init__(self, policy: Any = "llm-mesh", **target: Any) -> None:
        super().__init__(to=end("n2", "i2", **target), source=end("n1", "i1"), policy=policy)

    def arrived(self, tokens: int = 96, error: str = "") -> None:
        said = KvArrived(
            request_id=RequestId("r1"),
            attempt=2,
            tokens=tokens,
            moved_bytes=3 << 20,
            elapsed_s=0.003,
            error=error,
        )
        self.report(self.target, said)

    @property
    def left(self) -> int:
        return self.core.cell.migrations[RequestId("r1")].copy.prefill_left


def test_the_source_offers_what_the_target_fetches_and_the_rest_is_computed() -> None:
    cell = Linked()
    asked = cell.drain()
    offer = only(commands(asked, OfferKv), OfferKv)
    order = only(commands(asked, SubmitRequest), SubmitRequest).order
    assert order.kv is not None
    assert (order.kv.address, order.kv.attempt, order.kv.blocks) == ("n1:1", 1, 3)
    assert (offer.ticket, offer.to, offer.attempt) == (order.kv.ticket, NodeId("n2"), 1)
    assert (cell.state, cell.left) == (MigrationState.FETCHING, 7)
    cell.computed()
    assert cell.left == 7, "nothing is computed before they are there"
    cell.arrived()
    assert (cell.state, cell.left) == (MigrationState.COMPUTING, 7)
    cell.computed()
    assert (cell.state, cell.left) == (MigrationState.CAUGHT_UP, 0)


def test_what_does_not_come_is_computed() -> None:
    cell = Linked()
    cell.drain()
    cell.arrived(tokens=0, error="Unavailable")
    assert (cell.state, cell.left) == (MigrationState.COMPUTING, 103)
    assert cell.core.cell.nodes[NodeId("n2")].kv_shown_bytes_per_s == 1e11, (
        "what is quicker may be another"
    )


@pytest.mark.parametrize("target", [{"bytes_per_s": 1e3}, {"kv_format": "other"}])
def test_where_that_is_slower_or_cannot_be_tokens_move_alone(target: dict[str, Any]) -> None:
    cell = Linked(**target)
    asked = cell.drain()
    assert not commands(asked, OfferKv)
    assert only(commands(asked, SubmitRequest), SubmitRequest).order.kv is None
    assert cell.state is MigrationState.COMPUTING


@pytest.mark.parametrize("carry", [Carry.TOKENS, Carry.KV])
def test_a_policy_says_which(carry: Carry) -> None:
    def keep_up(cell: Any) -> Iterator[Move]:
        source, target = sorted(cell.instances(), key=lambda one: one.instance_id)
        yield Move(requests=tuple(cell.requests(source)), to=target, carry=carry)

    cell = Linked(policy=Other(upkeep=keep_up), bytes_per_s=1e3 if carry is Carry.KV else 1e12)
    asked = cell.tell(LeaseCheckDue())
    assert bool(commands(asked, OfferKv)) == (carry is Carry.KV)
    assert commands(asked, SubmitRequest)


def test_transfers_at_one_end_follow_each_other() -> None:
    cell = TwoNodes(to=end("n2", "i2", 1e9), source=end("n1", "i1", 1e9), beside=["r2"])
    cell.drain()
    first, second = (
        cell.core.cell.migrations[RequestId(name)].copy.carried_s for name in ("r1", "r2")
    )
    assert second - cell.now_s == pytest.approx(2 * (first - cell.now_s))


@pytest.mark.parametrize("local", [("n1:1", "127.0.0.1:1"), ("[::1]:1", "10.0.0.2:1")])
def test_nobody_dials_a_loopback_address_of_another_machine(local: tuple[str, str]) -> None:
    cell = Linked()
    for where, address in zip((cell.source, cell.target), local, strict=True):
        node_of = next(n for n in cell.core.cell.nodes.values() if n.link_id == where)
        node_of.hello = replace(node_of.hello, kv_address=address)
    assert not commands(cell.drain(), OfferKv)


def test_a_failed_transfer_is_held_against_a_node_for_minutes() -> None:
    cell = Linked()
    cell.drain()
    known = cell.core.cell.migrations[RequestId("r1")].copy.instance
    assert known is not None
    stated, now_s = known.node.hello.kv_bytes_per_s, 100.0
    known.node.note_no_transfer(now_s)
    rates = [known.node.kv_bytes_per_s(now_s + after_s) for after_s in (0.0, 60.0, 600.0)]
    assert rates == [pytest.approx(stated / 10), pytest.approx(stated / 5), stated]


def test_what_becomes_of_a_migration_that_nobody_knows_says_nothing_of_a_node() -> None:
    cell = Linked()
    cell.report(
        cell.target,
        KvArrived(
            request_id=RequestId("gone"),
            attempt=2,
            tokens=0,
            moved_bytes=0,
            elapsed_s=0.0,
            error="Unavailable",
        ),
    )
    for known in cell.core.cell.nodes.values():
        assert known.kv_shown_bytes_per_s == known.hello.kv_bytes_per_s


@pytest.mark.parametrize("kv", [True, False])
def test_from_where_weights_are_swapped_a_request_goes_on_elsewhere_at_once(kv: bool) -> None:
    """Its source may have no token for seconds, and holds memory while it is computed ahead."""
    cell = Linked(policy=Releasing(), kv_format="f" if kv else "other")
    cell.core.cell.nodes[NodeId("n1")].station.pools = True
    order = only(commands(cell.tell(LeaseCheckDue()), SubmitRequest), SubmitRequest).order
    assert order.paused is kv
    if kv:
        assert cell.runs_on == "i1"
        cell.arrived()
    assert cell.runs_on == "i2"
