"""The node core with a paused request: it computes it ahead, says so, and lets it go when told."""

from mesh.domain.actions import AbortInEngine, NodeAction, StartStep, SubmitToEngine
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    ComputedAhead,
    ContinueRequest,
    RequestReturned,
    SubmitRequest,
)
from mesh.domain.node_events import HeartbeatDue, SubmitBroke
from mesh.domain.reasons import FinishReason
from mesh.domain.request import RequestOrder
from mesh.domain.slo import Slo
from tests.core.cells import of_kind, only, request
from tests.core.nodes import NodeUnderTest, reports, token


def holding() -> tuple[NodeUnderTest, list[NodeAction]]:
    """A node that was sent a request of 3 prompt tokens and 2 of its output, to compute ahead."""
    node = NodeUnderTest()
    node.load()
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
    node = NodeUnderTest()
    node.load()
    node.submit("a")
    assert not of_kind(node.command(more(attempt=1)), SubmitToEngine), "that may be its last"
    after = node.step("i1", token("a", 0), prefill_tokens=3)
    assert only(after, SubmitToEngine).request.paused
    assert not of_kind(after, StartStep)
    on = node.command(more(attempt=1, paused=False))
    assert not only(on, SubmitToEngine).request.paused
    assert only(on, StartStep).prefill == 0, "it decodes as before"


def test_it_is_left_out_of_one_iteration_of_the_others() -> None:
    node = NodeUnderTest()
    node.load()
    for name in ("a", "b"):
        node.submit(name)
    node.step("i1", token("a", 0), token("b", 0), prefill_tokens=6)
    node.command(more(attempt=1))
    paused = node.step("i1", token("a", 1), token("b", 1))
    assert only(paused, SubmitToEngine).request.paused
    after = node.step("i1", token("b", 2))
    assert not only(after, SubmitToEngine).request.paused


def test_one_that_ends_in_that_iteration_is_not_begun_anew() -> None:
    node = NodeUnderTest()
    node.load()
    node.submit("a")
    node.command(more(attempt=1))
    last = token("a", 0, finish=FinishReason.LENGTH)
    assert not of_kind(node.step("i1", last, prefill_tokens=3), SubmitToEngine)


def test_an_engine_is_not_told_of_a_pause_that_was_over_before_it_began() -> None:
    node = NodeUnderTest()
    node.load()
    node.submit("a")
    for paused in (True, False):
        node.command(more(attempt=1, paused=paused))
    after = node.step("i1", token("a", 0), prefill_tokens=3)
    assert not of_kind(after, SubmitToEngine)
    assert of_kind(after, StartStep)


def test_an_iteration_that_began_before_says_nothing_of_it() -> None:
    """One is under way for another request when the paused one comes."""
    node = NodeUnderTest()
    node.load()
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
