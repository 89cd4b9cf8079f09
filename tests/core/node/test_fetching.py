"""The node core with a request whose KV blocks come from another node: it waits for them."""

from dataclasses import replace

import pytest

from mesh.domain.actions import AbortInEngine, FetchKv, StartStep, SubmitToEngine
from mesh.domain.ids import InstanceId, NodeId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    ComputedAhead,
    KvArrived,
    OfferKv,
    SubmitRequest,
)
from mesh.domain.node_events import HeartbeatDue
from mesh.domain.request import KvSource, RequestOrder
from mesh.domain.slo import Slo
from tests.core.cells import of_kind, only, request
from tests.core.nodes import NodeUnderTest, reports

SOURCE = KvSource(node_id=NodeId("n1"), address="127.0.0.1:1", attempt=1, ticket="a/2", blocks=2)
CAME = KvArrived(request_id=RequestId("a"), attempt=2, tokens=64, moved_bytes=640, elapsed_s=0.1)


def fetching(tokens: int = 70) -> NodeUnderTest:
    """A node that fetches two blocks of 32 tokens of a request of so many."""
    node = NodeUnderTest()
    node.load()
    order = RequestOrder(
        request=request("a", prompt=(1,) * (tokens - 2)),
        attempt=2,
        output_tokens=(40, 41),
        slo=Slo(),
        age_s=1.0,
        due_in_s=2.0,
        paused=True,
        cached_tokens=64,
        kv=SOURCE,
    )
    asked = node.command(SubmitRequest(instance_id=InstanceId("i1"), order=order))
    fetch = only(asked, FetchKv)
    assert (fetch.source, fetch.request.paused) == (SOURCE, True)
    assert not of_kind(asked, SubmitToEngine)
    assert not of_kind(asked, StartStep), "there is nothing to compute until they are there"
    return node


def test_what_the_blocks_leave_is_computed() -> None:
    node = fetching()
    after = node.tell(CAME)
    assert only(reports(after), KvArrived) == CAME
    assert not of_kind(after, SubmitToEngine), "it came to its engine with them"
    assert only(after, StartStep).prefill == 70 - 1 - 64
    assert of_kind(reports(node.step("i1", prefill_tokens=5)), ComputedAhead)


def test_one_that_has_nothing_left_to_compute_is_ahead() -> None:
    node = fetching(tokens=65)
    after = node.tell(CAME)
    assert [type(said) for said in reports(after)] == [KvArrived, ComputedAhead]
    assert not of_kind(after, StartStep)


def test_all_of_it_is_computed_where_none_come() -> None:
    node = fetching()
    after = node.tell(replace(CAME, tokens=0, error="Unavailable", message="it was lost"))
    assert only(after, SubmitToEngine).request.paused
    assert only(after, StartStep).prefill == 69
    assert only(reports(after), KvArrived).error == "Unavailable"


def test_an_iteration_of_others_says_nothing_of_it() -> None:
    node = fetching()
    node.submit("b")
    assert not of_kind(reports(node.step("i1", prefill_tokens=3)), ComputedAhead)


def test_blocks_that_come_for_what_was_aborted_are_nobodys() -> None:
    node = fetching()
    aborted = node.command(AbortRequest(request_id=RequestId("a"), attempt=2))
    assert of_kind(aborted, AbortInEngine)
    assert not node.tell(CAME)


@pytest.mark.parametrize("attempt", [1, 2])
def test_only_what_runs_is_offered(attempt: int) -> None:
    node = NodeUnderTest()
    node.load()
    node.submit("a", attempt=1)
    offer = OfferKv(
        instance_id=InstanceId("i1"),
        request_id=RequestId("a"),
        attempt=attempt,
        to=NodeId("n2"),
        ticket="a/2",
        expires_s=30.0,
    )
    assert of_kind(node.command(offer), OfferKv) == ([offer] if attempt == 1 else [])


def test_blocks_on_their_way_are_not_taken_for_memory_beside_the_engines() -> None:
    node = fetching()
    for _ in range(2):
        node.tell(HeartbeatDue(rss_bytes=640, engine_bytes=0))
    assert node.core.base_bytes == 0
