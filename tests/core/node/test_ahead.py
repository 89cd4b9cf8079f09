"""The node core with a paused request: computed ahead or fetched, told of, let go when told."""

from dataclasses import replace

import pytest

from mesh.domain.actions import AbortInEngine, FetchKv, NodeAction, StartStep, SubmitToEngine
from mesh.domain.ids import InstanceId, NodeId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    ComputedAhead,
    ContinueRequest,
    KvArrived,
    OfferKv,
    RequestReturned,
    SubmitRequest,
)
from mesh.domain.node_events import HeartbeatDue, SubmitBroke
from mesh.domain.reasons import FinishReason
from mesh.domain.request import KvSource, RequestOrder
from mesh.domain.slo import Slo
from tests.core.cells import of_kind, only, request
from tests.core.nodes import NodeUnderTest, reports, token


def holding() -> tuple[NodeUnderTest, list[NodeAction]]:
    """A node that was sent a request of 3 prompt tokens and 2 of its output, to compute ahead."""
    node = NodeUnderTest("i1")
    return node, node.command(submission())


def submission() -> SubmitRequest:
    order = RequestOrder(
        request=request("a"),
        attempt=2,
        output_tokens=(40, 41),
        slo=Slo(),
        age_s=1.0,
        due_in_s=2.0,
        paused=True,
    )
    return SubmitRequest(instance_id=InstanceId("i1"), order=order)


def more(*token_ids: int, paused: bool = True, attempt: int = 2) -> ContinueRequest:
    return ContinueRequest(
        instance_id=InstanceId("i1"),
        request_id=RequestId("a"),
        attempt=attempt,
        token_ids=token_ids,
        paused=paused,
        due_in_s=0.2,
    )


def test_a_paused_request_is_computed_and_then_gets_no_turn() -> None:
    node, asked = holding()
    assert only(asked, SubmitToEngine).request.paused
    assert only(asked, StartStep).prefill == 4, "all but its last token"
    after = node.step("i1", prefill_tokens=4)
    assert only(reports(after), ComputedAhead) == ComputedAhead(
        request_id=RequestId("a"), attempt=2
    )
    assert not of_kind(after, StartStep)
    assert not of_kind(node.tell(HeartbeatDue(rss_bytes=1, engine_bytes=1)), StartStep)


def test_a_chunk_of_it_is_not_all_of_it() -> None:
    node, _ = holding()
    after = node.step("i1", prefill_tokens=3, prefill_left={"a": 1})
    assert not of_kind(reports(after), ComputedAhead)
    assert only(after, StartStep).prefill == 1


def test_it_computes_what_came_meanwhile_and_goes_on_when_let_go() -> None:
    node, _ = holding()
    node.step("i1", prefill_tokens=4)
    asked = node.command(more(42, 43))
    assert only(asked, SubmitToEngine).request.output_tokens == (40, 41, 42, 43)
    assert only(asked, StartStep).prefill == 2
    assert of_kind(reports(node.step("i1", prefill_tokens=2)), ComputedAhead)

    asked = node.command(more(44, paused=False))
    assert not only(asked, SubmitToEngine).request.paused
    assert only(asked, StartStep).prefill == 2, "its last token, and the one before"
    after = node.step("i1", token("a", 5, attempt=2), prefill_tokens=2)
    assert not of_kind(reports(after), ComputedAhead)
    assert only(after, StartStep).prefill == 0, "it decodes"


def test_one_that_runs_is_held_after_the_iteration_that_is_under_way_and_goes_on() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    assert not of_kind(node.command(more(attempt=1)), SubmitToEngine), "that may be its last"
    after = node.step("i1", token("a", 0), prefill_tokens=3)
    assert only(after, SubmitToEngine).request.paused
    assert not of_kind(after, StartStep)
    on = node.command(more(attempt=1, paused=False))
    assert not only(on, SubmitToEngine).request.paused
    assert only(on, StartStep).prefill == 0, "it decodes as before"


def test_it_is_left_out_of_one_iteration_of_the_others() -> None:
    node = NodeUnderTest("i1")
    for name in ("a", "b"):
        node.submit(name)
    node.step("i1", token("a", 0), token("b", 0), prefill_tokens=6)
    node.command(more(attempt=1))
    paused = node.step("i1", token("a", 1), token("b", 1))
    assert only(paused, SubmitToEngine).request.paused
    after = node.step("i1", token("b", 2))
    assert not only(after, SubmitToEngine).request.paused


def test_one_that_ends_in_that_iteration_is_not_begun_anew() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    node.command(more(attempt=1))
    last = token("a", 0, finish=FinishReason.LENGTH)
    assert not of_kind(node.step("i1", last, prefill_tokens=3), SubmitToEngine)


def test_an_engine_is_not_told_of_a_pause_that_was_over_before_it_began() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    for paused in (True, False):
        node.command(more(attempt=1, paused=paused))
    after = node.step("i1", token("a", 0), prefill_tokens=3)
    assert not of_kind(after, SubmitToEngine)
    assert of_kind(after, StartStep)


def test_an_iteration_that_began_before_says_nothing_of_it() -> None:
    """One is under way for another request when the paused one comes."""
    node = NodeUnderTest("i1")
    node.submit("b")
    node.command(submission())
    after = node.step("i1", token("b", 0), prefill_tokens=3)
    assert not of_kind(reports(after), ComputedAhead)


def test_what_is_for_another_attempt_or_for_nobody_changes_nothing() -> None:
    node, _ = holding()
    node.step("i1", prefill_tokens=4)
    assert not of_kind(node.command(more(42, attempt=1)), SubmitToEngine)
    dropped = node.command(AbortRequest(request_id=RequestId("a"), attempt=2))
    assert of_kind(dropped, AbortInEngine)
    assert not of_kind(node.command(more(42)), SubmitToEngine)


def test_an_engine_that_does_not_let_it_go_on_drops_it() -> None:
    node, _ = holding()
    node.step("i1", prefill_tokens=4)
    node.command(more(42))
    broke = SubmitBroke(request_id=RequestId("a"), attempt=2, error="EngineError", message="no")
    actions = node.tell(broke)
    assert only(reports(actions), RequestReturned).attempt == 2
    assert of_kind(actions, AbortInEngine)


SOURCE = KvSource(node_id=NodeId("n1"), address="127.0.0.1:1", attempt=1, ticket="a/2", blocks=2)
CAME = KvArrived(request_id=RequestId("a"), attempt=2, tokens=64, moved_bytes=640, elapsed_s=0.1)


def fetching(tokens: int = 70) -> NodeUnderTest:
    """A node that fetches two blocks of 32 tokens of a request of so many."""
    node = NodeUnderTest("i1")
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
    node = NodeUnderTest("i1")
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
