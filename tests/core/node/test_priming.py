"""Priming: sizes are computed when nothing else is, once, and requests go first."""

from dataclasses import replace

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction, StartMeasure, StartStep
from mesh.domain.ids import InstanceId, OperationId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import KvResized, ProfileInstance, ResizeKv
from mesh.domain.model import Task
from mesh.domain.node_events import HeartbeatDue, LinkOpened, MeasureBroke, MeasureFinished
from mesh.domain.reasons import FinishReason
from tests.core.cells import of_kind, only
from tests.core.nodes import NodeUnderTest, load_command, token

I1 = InstanceId("i1")
BEAT = HeartbeatDue(rss_bytes=0)


def priming_node(tokens_max: int) -> NodeUnderTest:
    node = NodeUnderTest()
    node.core = NodeCore(limits=NodeLimits(primed_tokens_max=tokens_max))
    node.tell(LinkOpened())
    return node


def test_each_batch_and_short_prefills_are_computed_once() -> None:
    node = priming_node(16)
    node.load("i1")
    actions = node.tell(BEAT)
    shapes = []
    while found := of_kind(actions, StartMeasure):
        shapes.append((found[0].shape.decode_batch, found[0].shape.prefill_tokens))
        actions = node.tell(MeasureFinished(instance_id=I1, elapsed_s=0.01))
    decodes, prefills = range(1, 9), range(4, 17, 4)
    assert shapes == [*((batch, 0) for batch in decodes), *((0, tokens) for tokens in prefills)]


def test_an_encoder_is_never_asked_for_decodes_or_pasts() -> None:
    """Neither when it is primed nor when it is surveyed."""
    node = priming_node(8)
    command = load_command()
    model = replace(command.model, architecture="bert", task=Task.EMBED)
    node.load(command=replace(command, model=model))
    shapes = []

    def measure(actions: list[NodeAction]) -> None:
        while found := of_kind(actions, StartMeasure):
            shapes.append(found[0].shape)
            actions = node.tell(MeasureFinished(instance_id=I1, elapsed_s=0.01))

    measure(node.tell(BEAT))
    assert [one.prefill_tokens for one in shapes] == [4, 8]
    measure(node.command(ProfileInstance(operation_id=OperationId("op"), instance_id=I1)))
    assert {(one.decode_batch, one.prefill_past_tokens) for one in shapes} == {(0, 0)}
    assert max(one.prefill_tokens for one in shapes) == command.context_tokens_max - 1


def test_who_a_load_was_for_waits_for_no_size() -> None:
    node = priming_node(16)
    assert not of_kind(node.load("i1"), StartMeasure)
    assert only(node.submit("a", "i1"), StartStep).instance_id == "i1"


def test_who_a_grow_is_for_waits_for_no_size() -> None:
    node = priming_node(16)
    node.load("i1")
    grown = node.command(ResizeKv(instance_id=I1, kv_blocks=32))
    assert not of_kind(grown, StartMeasure)
    assert only(node.submit("a", "i1"), StartStep).instance_id == "i1"
    ended = node.tell(KvResized(instance_id=I1, kv_blocks=32, elapsed_s=0.0))
    assert not of_kind(ended, StartMeasure)


def test_a_next_turn_that_follows_at_once_waits_for_no_size() -> None:
    node = priming_node(16)
    node.load("i1")
    node.submit("a", "i1")
    assert not of_kind(node.step("i1", token("a", 0, finish=FinishReason.STOP)), StartMeasure)
    assert of_kind(node.tell(BEAT), StartMeasure)


def test_a_request_goes_before_the_next_size() -> None:
    node = priming_node(16)
    node.load("i1")
    node.tell(BEAT)
    node.submit("a", "i1")
    actions = node.tell(MeasureFinished(instance_id=I1, elapsed_s=0.01))
    assert only(actions, StartStep).instance_id == "i1"
    assert not of_kind(actions, StartMeasure)


def test_a_size_that_cannot_be_computed_is_left_out() -> None:
    node = priming_node(8)
    node.load("i1")
    first = only(node.tell(BEAT), StartMeasure).shape
    broke = MeasureBroke(instance_id=I1, error="OutOfMemory", message="no")
    assert only(node.tell(broke), StartMeasure).shape != first


def test_nothing_is_primed_where_the_node_is_told_so() -> None:
    node = priming_node(0)
    node.load("i1")
    assert not of_kind(node.tell(BEAT), StartMeasure)


def test_a_size_that_the_kv_cache_does_not_hold_waits_until_it_does() -> None:
    """A batch of n takes n blocks, 8 prompt tokens take one."""
    node = priming_node(8)
    node.load("i1")
    first = only(node.tell(BEAT), StartMeasure).shape
    node.command(ResizeKv(instance_id=I1, kv_blocks=2))
    shapes = [first]

    def prime() -> None:
        while found := of_kind(
            node.tell(MeasureFinished(instance_id=I1, elapsed_s=0.01)), StartMeasure
        ):
            shapes.append(found[0].shape)

    prime()
    assert [(s.decode_batch, s.prefill_tokens) for s in shapes] == [(1, 0), (2, 0), (0, 4), (0, 8)]
    node.command(ResizeKv(instance_id=I1, kv_blocks=16))
    shapes = [only(node.tell(BEAT), StartMeasure).shape]
    prime()
    assert [shape.decode_batch for shape in shapes] == [3, 4, 5, 6, 7, 8]
