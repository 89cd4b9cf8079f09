"""The node core and KV caches: resizes, requests that starve, and what is told of memory."""

from collections.abc import Callable, Sequence

import pytest

from mesh.domain.actions import (
    AbortInEngine,
    NodeAction,
    SendReport,
    StartMeasure,
    StartStep,
    SubmitToEngine,
)
from mesh.domain.ids import InstanceId, OperationId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    Heartbeat,
    InstanceGone,
    KvResized,
    LoadFailed,
    ProfileInstance,
    RequestReturned,
    ResizeKv,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.node_events import HeartbeatDue, LinkClosed, LinkOpened, MeasureFinished, StepBroke
from mesh.domain.reasons import FinishReason
from tests.core.cells import of_kind, only
from tests.core.nodes import (
    ENGINE_BYTES,
    RSS_BYTES,
    NodeUnderTest,
    load_command,
    loaded,
    outputs,
    reports,
    token,
)

I1 = InstanceId("i1")
LOADED_BLOCKS = 16

Ask = Callable[[NodeUnderTest], list[NodeAction]]


def loaded_node() -> NodeUnderTest:
    return NodeUnderTest("i1")


def resize(node: NodeUnderTest, kv_blocks: int, of: InstanceId = I1) -> list[NodeAction]:
    return node.command(ResizeKv(instance_id=of, kv_blocks=kv_blocks))


def resized(node: NodeUnderTest, kv_blocks: int) -> list[NodeAction]:
    return node.tell(KvResized(instance_id=I1, kv_blocks=kv_blocks, elapsed_s=0.02))


def told_blocks(node: NodeUnderTest) -> int:
    """The blocks in the hello that would be sent now."""
    (report,) = node.core.instances()
    return report.kv_blocks


def starved(actions: Sequence[NodeAction]) -> tuple[RequestId, ...]:
    return only(reports(actions), TokensReport).starved


def test_a_resize_is_answered_with_the_blocks_in_force() -> None:
    """More than wanted: a shrink met blocks in use."""
    node = loaded_node()
    assert resize(node, 8) == [ResizeKv(instance_id=I1, kv_blocks=8)]
    assert reports(resized(node, 10)) == [KvResized(instance_id=I1, kv_blocks=10, elapsed_s=0.02)]
    assert told_blocks(node) == 10


def test_a_resize_that_breaks_leaves_the_blocks_as_they_were() -> None:
    node = loaded_node()
    resize(node, 8)
    resized(node, 8)
    resize(node, 64)
    broke = KvResized(
        instance_id=I1, kv_blocks=0, elapsed_s=0.0, error="OutOfMemory", message="no room"
    )
    (said,) = reports(node.tell(broke))
    assert said == KvResized(
        instance_id=I1, kv_blocks=8, elapsed_s=0.0, error="OutOfMemory", message="no room"
    )
    assert told_blocks(node) == 8
    only(node.submit("a"), SubmitToEngine)


@pytest.mark.parametrize(
    ("wanted", "most"), [([4], [16, 4]), ([24], [24, 24]), ([4, 24, 8], [24, 24, 24, 8])]
)
def test_until_resizes_are_done_a_hello_tells_the_most_blocks_that_may_be_held(
    wanted: list[int], most: list[int]
) -> None:
    """Who does not know of the resizes must not give their memory to another instance."""
    node = loaded_node()
    asked = [only(resize(node, blocks), ResizeKv).kv_blocks for blocks in wanted]
    assert asked == wanted
    told = [told_blocks(node)]
    for blocks in wanted:
        resized(node, blocks)
        told.append(told_blocks(node))
    assert told == most


def test_a_resize_amid_an_iteration_is_asked_for_at_once_and_before_a_later_submit() -> None:
    node = loaded_node()
    node.submit("a")
    actions = [*resize(node, 32), *node.submit("b"), *resize(node, 48)]
    assert [type(action) for action in actions] == [ResizeKv, SubmitToEngine, ResizeKv]
    assert of_kind(actions, StartStep) == [], "one iteration at a time"
    assert [output.request_id for output in outputs(node.step("i1", token("a", 0)))] == ["a"]


def test_a_resize_of_an_instance_that_is_not_there_reports_it_gone() -> None:
    node = loaded_node()
    gone = resize(node, 8, of=InstanceId("i9"))
    assert reports(gone) == [InstanceGone(instance_id=InstanceId("i9"))]
    assert not of_kind(gone, ResizeKv)


def test_the_end_of_an_instance_that_goes_answers_for_its_resize() -> None:
    node = loaded_node()
    node.command(UnloadInstance(instance_id=I1))
    assert resize(node, 8) == []
    assert reports(node.tell(InstanceGone(instance_id=I1))) == [InstanceGone(instance_id=I1)]


def test_an_instance_that_loads_is_not_resized() -> None:
    node = NodeUnderTest()
    node.command(load_command())
    assert resize(node, 8) == []


def test_a_resize_under_way_is_answered_before_the_end_of_its_instance() -> None:
    node = loaded_node()
    node.submit("a")
    resize(node, 32)
    broke = node.tell(StepBroke(instance_id=I1, error="EngineError", message="boom"))
    only(broke, UnloadInstance)
    assert only(reports(resized(node, 32)), KvResized).kv_blocks == 32
    only(reports(node.tell(InstanceGone(instance_id=I1))), InstanceGone)
    assert resized(node, 32) == [], "nobody has this instance any more"


def test_a_resize_that_ends_without_a_link_is_in_the_next_hello() -> None:
    node = loaded_node()
    resize(node, 32)
    node.tell(LinkClosed(reason="reset"))
    assert told_blocks(node) == 32
    assert resized(node, 24) == []
    assert told_blocks(node) == 24


def test_a_new_link_gets_no_answer_to_what_the_old_one_asked_for_but_sees_what_came_of_it() -> None:
    """The answer would be taken for that to a resize which the new link has asked for meanwhile."""
    node = loaded_node()
    resize(node, 4)
    node.tell(LinkClosed(reason="reset"))
    assert told_blocks(node) == LOADED_BLOCKS
    node.tell(LinkOpened())
    said = reports(resized(node, 4))
    assert [instance.kv_blocks for instance in only(said, Heartbeat).instances] == [4]
    assert of_kind(said, KvResized) == [], "it would pass for one that the new link has asked for"
    resize(node, 8)
    assert only(reports(resized(node, 8)), KvResized).kv_blocks == 8


def test_growth_waits_for_what_an_old_link_was_loading_to_leave_the_memory() -> None:
    node = loaded_node()
    node.command(load_command("i2"))
    node.reconnect()
    assert of_kind(resize(node, LOADED_BLOCKS + 1), ResizeKv) == []
    left = node.tell(loaded(InstanceId("i2")))
    assert only(left, UnloadInstance).instance_id == "i2"
    free = node.tell(InstanceGone(instance_id=InstanceId("i2")))
    assert only(free, ResizeKv).kv_blocks == LOADED_BLOCKS + 1
    assert only(reports(resized(node, LOADED_BLOCKS + 1)), KvResized).error == ""


def test_a_shrink_does_not_wait_and_growth_that_waits_does_not_outlive_its_link() -> None:
    node = loaded_node()
    node.command(load_command("i2"))
    node.reconnect()
    assert only(resize(node, 4), ResizeKv).kv_blocks == 4
    resized(node, 4)
    resize(node, LOADED_BLOCKS)
    node.reconnect()
    failed = LoadFailed(instance_id=InstanceId("i2"), error="TornModel", message="torn", hint="")
    assert of_kind(node.tell(failed), ResizeKv) == []


def test_growth_that_waits_goes_with_its_instance() -> None:
    node = loaded_node()
    node.command(load_command("i2"))
    node.reconnect()
    resize(node, LOADED_BLOCKS + 1)
    node.command(UnloadInstance(instance_id=I1))
    failed = LoadFailed(instance_id=InstanceId("i2"), error="TornModel", message="torn", hint="")
    assert of_kind(node.tell(failed), ResizeKv) == []


def test_requests_that_starve_are_reported_and_stay() -> None:
    """Who gives its blocks up is for the controller to say."""
    node = loaded_node()
    node.submit("old", age_s=1.0)
    node.submit("new")
    node.step("i1", token("old", 0))
    actions = node.step("i1", token("old", 1), starved=["new"])
    assert starved(actions) == ("new",)
    assert of_kind(actions, AbortInEngine) == []
    assert of_kind(reports(actions), RequestReturned) == []
    assert only(actions, StartStep).instance_id == I1, "the other one computes on"
    after = node.step("i1", token("old", 2), token("new", 0))
    assert [output.request_id for output in outputs(after)] == ["old", "new"]
    assert starved(after) == ()


def test_only_requests_that_run_and_took_part_are_said_to_starve() -> None:
    node = loaded_node()
    for name in ("a", "b", "c"):
        node.submit(name)
    node.step("i1", token("a", 0), token("b", 0), token("c", 0))
    node.command(AbortRequest(request_id=RequestId("b"), attempt=1))
    node.command(AbortRequest(request_id=RequestId("c"), attempt=1))
    node.submit("c", attempt=2)
    ended = token("a", 1, finish=FinishReason.STOP)
    assert starved(node.step("i1", ended, starved=["a", "b", "c"])) == ()


def starving_node() -> tuple[NodeUnderTest, list[NodeAction]]:
    """No request of i1 could compute anything; what it did on that."""
    node = loaded_node()
    node.submit("a")
    node.submit("b")
    node.step("i1", token("a", 0), token("b", 0))
    actions = node.step("i1", starved=["a", "b"])
    assert starved(actions) == ("a", "b")
    return node, actions


def test_an_iteration_that_computed_nothing_is_not_tried_again_at_once() -> None:
    """It would take every turn, and send a report of each."""
    node, actions = starving_node()
    assert of_kind(actions, StartStep) == []
    other = node.load("i2")
    assert of_kind(other, StartStep) == []
    assert only(node.submit("c", "i2"), StartStep).instance_id == "i2"
    after = node.step("i2", token("c", 0, finish=FinishReason.STOP))
    assert of_kind(after, StartStep) == []


def ask_for_blocks(node: NodeUnderTest) -> list[NodeAction]:
    return resize(node, 32)


def take_a_request_back(node: NodeUnderTest) -> list[NodeAction]:
    return node.command(AbortRequest(request_id=RequestId("b"), attempt=1))


def bring_another_request(node: NodeUnderTest) -> list[NodeAction]:
    return node.submit("c")


HELP = [ask_for_blocks, take_a_request_back, bring_another_request]


@pytest.mark.parametrize("asked", HELP)
def test_a_starved_instance_gets_its_turn_after_what_may_help_it(asked: Ask) -> None:
    node, _ = starving_node()
    first, second = asked(node)
    assert isinstance(first, ResizeKv | AbortInEngine | SubmitToEngine)
    assert isinstance(second, StartStep), "the engine gets it in this order"


@pytest.mark.parametrize("asked", HELP)
def test_help_that_is_asked_for_amid_the_iteration_that_starves_counts(asked: Ask) -> None:
    """The engine gets it after that iteration, which could not know of it."""
    node = loaded_node()
    node.submit("a")
    node.submit("b")
    node.step("i1", token("a", 0), token("b", 0))
    asked(node)
    assert only(node.step("i1", starved=["a", "b"]), StartStep).instance_id == I1


def test_a_starved_instance_tries_again_at_each_heartbeat() -> None:
    """So that the controller hears of it again, should it have missed its chance to help."""
    node, _ = starving_node()
    for _ in range(3):
        assert only(node.tell(HeartbeatDue(rss_bytes=1)), StartStep).instance_id == I1
        assert of_kind(node.step("i1", starved=["a", "b"]), StartStep) == []


def test_a_part_of_a_prompt_is_progress() -> None:
    node = loaded_node()
    node.submit("a", prompt=300)
    node.submit("b", prompt=300)
    node.step("i1", prefill_left={"a": 172}, prefill_tokens=128)
    actions = node.step("i1", prefill_left={"a": 44}, prefill_tokens=128, starved=["b"])
    assert only(actions, StartStep).instance_id == I1


def test_a_heartbeat_tells_what_process_and_engine_hold() -> None:
    node = loaded_node()
    said = node.heartbeat()
    assert (said.rss_bytes, said.engine_bytes) == (RSS_BYTES, ENGINE_BYTES)
    node.tell(LinkClosed(reason="reset"))
    (first,) = reports(node.tell(LinkOpened()))
    assert first == said, "as last measured"


def test_a_survey_reckons_with_the_blocks_of_a_resize_before_it() -> None:
    """And goes on through those that come meanwhile."""
    node = loaded_node()
    resize(node, 4 * LOADED_BLOCKS)
    command = ProfileInstance(operation_id=OperationId("op"), instance_id=I1)
    actions = node.command(command)
    tokens = []
    while asked := of_kind(actions, StartMeasure):
        shape = asked[0].shape
        tokens.append(shape.decode_batch * shape.decode_context_tokens)
        assert resize(node, 4 * LOADED_BLOCKS) == [ResizeKv(instance_id=I1, kv_blocks=64)]
        actions = node.tell(MeasureFinished(instance_id=I1, elapsed_s=0.2))
    assert LOADED_BLOCKS * 32 < max(tokens) <= 4 * LOADED_BLOCKS * 32


def test_what_is_beside_the_engines_books_is_told_after_two_quiet_heartbeats() -> None:
    node = loaded_node()

    def told(rss_bytes: int) -> int:
        sent = only(node.tell(HeartbeatDue(rss_bytes=rss_bytes, engine_bytes=200)), SendReport)
        assert isinstance(sent.report, Heartbeat)
        return sent.report.base_bytes

    assert [told(rss_bytes) for rss_bytes in (300, 320, 310, 900, 300)] == [0, 100, 110, 110, 110]
    node.command(load_command("i2"))
    assert [told(900), told(900)] == [110, 110]
    node.tell(loaded(InstanceId("i2")))
    assert [told(900), told(900), told(300)] == [110, 700, 700]
