"""Moves that take KV blocks along: when they do, and what becomes of the copy."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mesh.domain.events import LeaseCheckDue
from mesh.domain.ids import NodeId, RequestId
from mesh.domain.lifecycle import MigrationState
from mesh.domain.messages import KvArrived, NodeHello, OfferKv, SubmitRequest
from mesh.policy.plans import Carry, Move
from tests.core.admission import instance, node
from tests.core.cells import commands, only
from tests.core.controller.test_policy_faults import Other
from tests.core.two_nodes import TwoNodes


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
