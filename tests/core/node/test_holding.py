"""What a node does with requests whose controller is gone, and what the next one hears of them."""

from mesh.domain.actions import AbortInEngine, StartStep
from mesh.domain.ids import RequestId
from mesh.domain.limits import KEPT_OUTPUTS_MAX, NodeLimits
from mesh.domain.messages import Heartbeat, RequestReturned, TokensReport
from mesh.domain.node_events import LinkClosed, LinkOpened
from mesh.domain.node_rule import Adopted, NodeRule
from mesh.domain.reasons import FinishReason
from tests.core.cells import of_kind, only
from tests.core.nodes import NodeUnderTest, reports, token

HOLD_S = NodeLimits().hold_s_max


def cut_off() -> NodeUnderTest:
    """A node that has lost its link, with a request whose client may come again, and another."""
    node = NodeUnderTest("i1")
    node.submit("kept", keyed=True, so_far=(7,), age_s=2.0)
    node.submit("other")
    node.step("i1", token("kept", 1), token("other", 0))
    gone = node.tell(LinkClosed(reason="gone"))
    assert [action.request_id for action in of_kind(gone, AbortInEngine)] == ["other"]
    return node


def opened(*adopted: Adopted) -> LinkOpened:
    return LinkOpened(rule=NodeRule(turn_s_max=0.0, adopted=adopted))


def adopted(next_index: int, name: str = "kept", attempt: int = 1) -> Adopted:
    return Adopted(request_id=RequestId(name), attempt=attempt, next_index=next_index)


def test_it_computes_on_and_tells_the_next_controller_what_it_lacks() -> None:
    node = cut_off()
    node.now_s += 1.0
    on = node.step("i1", token("kept", 2))
    assert only(on, StartStep).instance_id == "i1"
    assert not reports(on)
    (held,) = node.core.requests()
    assert [output.first_index for output in held.outputs] == [1, 2]
    assert (held.order.output_tokens, held.order.age_s, held.prefill_left) == ((7,), 3.0, 0)
    node.step("i1", token("kept", 3))  # amid the hello and its answer
    told = node.tell(opened(adopted(3)))
    assert [o.first_index for o in only(reports(told), TokensReport).outputs] == [3]
    assert not of_kind(told, AbortInEngine)
    assert [
        o.first_index
        for o in only(reports(node.step("i1", token("kept", 4))), TokensReport).outputs
    ] == [4]


def test_what_the_next_controller_does_not_take_ends() -> None:
    for other in ((), (adopted(3, attempt=2),)):
        node = cut_off()
        told = node.tell(opened(*other))
        assert only(told, AbortInEngine).request_id == "kept"
        assert len(of_kind(reports(told), RequestReturned)) == len(other)


def test_one_that_ended_meanwhile_is_told_with_its_end() -> None:
    node = cut_off()
    node.step("i1", token("kept", 2, finish=FinishReason.STOP))
    (held,) = node.core.requests()
    assert held.outputs[-1].finish is FinishReason.STOP
    told = node.tell(opened(adopted(2)))
    assert [o.finish for o in only(reports(told), TokensReport).outputs] == [FinishReason.STOP]
    assert node.core.requests() == ()


def test_it_computes_on_for_a_while_and_what_was_taken_in_vain_is_given_back() -> None:
    node = cut_off()
    node.now_s += HOLD_S
    node.heartbeat_unheard()
    assert node.core.requests()
    node.now_s += 0.1
    assert only(node.heartbeat_unheard(), AbortInEngine).request_id == "kept"
    assert node.core.requests() == ()
    returned = only(reports(node.tell(opened(adopted(2)))), RequestReturned)
    assert (returned.request_id, returned.attempt) == ("kept", 1)


def test_the_outputs_that_it_keeps_are_bounded_and_no_token_is_lost() -> None:
    node = NodeUnderTest("i1")
    node.submit("kept", keyed=True)
    count = KEPT_OUTPUTS_MAX + 5
    for index in range(count):
        node.step("i1", token("kept", index))
    node.tell(LinkClosed(reason="gone"))
    (held,) = node.core.requests()
    assert len(held.outputs) == KEPT_OUTPUTS_MAX
    assert held.order.output_tokens == tuple(range(40, 45))
    assert held.outputs[0].first_index == 5


def test_what_is_told_of_one_that_ended_says_how_slow_its_instance_is() -> None:
    node = cut_off()
    node.step("i1", token("kept", 2, finish=FinishReason.STOP))
    told = reports(node.tell(opened(adopted(2))))
    (instance,) = only(told, Heartbeat).instances
    assert only(told, TokensReport).correction == instance.correction != 1.0
