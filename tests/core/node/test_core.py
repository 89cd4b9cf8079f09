"""The node core: turns by least headroom, tokens reported, aborts, unloads, lost links."""

import pytest

from mesh.domain.actions import AbortInEngine, SendReport, StartStep, SubmitToEngine
from mesh.domain.ids import InstanceId, OperationId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    CancelImport,
    Heartbeat,
    ImportModel,
    InstanceGone,
    InstanceLoaded,
    LoadFailed,
    LoadInstance,
    RequestReturned,
    UnloadInstance,
)
from mesh.domain.node_events import (
    AbortFinished,
    LinkClosed,
    LinkOpened,
    NodeEvent,
    StepBroke,
    SubmitBroke,
)
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo
from tests.core.cells import MODEL, only
from tests.core.nodes import NodeUnderTest, load_command, loaded, outputs, reports, token


def test_the_turn_goes_to_the_request_with_the_least_headroom() -> None:
    node = NodeUnderTest("i1", "i2")
    assert only(node.submit("a", "i1"), StartStep).instance_id == "i1"
    waiting = node.submit("b", "i2", age_s=1.5)
    assert not [a for a in waiting if isinstance(a, StartStep)], "one iteration at a time"
    assert only(node.step("i1", token("a", 0)), StartStep).instance_id == "i2"
    after = node.step("i2", token("b", 0))
    assert only(after, StartStep).instance_id == "i2", "b came 1.5 s earlier and is still behind"


def test_a_tighter_slo_gets_more_turns() -> None:
    node = NodeUnderTest("i1", "i2")
    node.submit("slow", "i1", slo=Slo(tpot_s=0.4))
    node.submit("fast", "i2", slo=Slo(tpot_s=0.1))
    turns = {"i1": 0, "i2": 0}
    index = {"i1": 0, "i2": 0}
    on = "i1"
    for _ in range(100):
        node.now_s += 0.05
        turns[on] += 1
        actions = node.step(on, token("slow" if on == "i1" else "fast", index[on]))
        index[on] += 1
        on = only(actions, StartStep).instance_id
    assert 3.0 < turns["i2"] / turns["i1"] < 5.0


def test_the_next_iteration_starts_before_the_tokens_are_sent() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    actions = node.step("i1", token("a", 0))
    assert [type(action) for action in actions] == [StartStep, SendReport]


def test_an_instance_without_work_gets_no_turn() -> None:
    node = NodeUnderTest()
    assert not [a for a in node.load() if isinstance(a, StartStep)]
    node.submit("a")
    done = node.step("i1", token("a", 0, finish=FinishReason.STOP))
    assert not [a for a in done if isinstance(a, StartStep)]
    assert [output.finish for output in outputs(done)] == [FinishReason.STOP]


def test_an_aborted_requests_tokens_of_the_iteration_under_way_are_for_nobody() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    abort = node.command(AbortRequest(request_id=RequestId("a"), attempt=1))
    assert only(abort, AbortInEngine).request_id == "a"
    assert outputs(node.step("i1", token("a", 0))) == ()


def test_tokens_of_an_earlier_attempt_are_not_taken_for_the_new_ones() -> None:
    """A request is aborted and submitted again while an iteration runs: the iteration's tokens
    belong to the old attempt.
    """
    node = NodeUnderTest("i1")
    node.submit("a")
    node.command(AbortRequest(request_id=RequestId("a"), attempt=1))
    node.submit("a", attempt=2)
    assert outputs(node.step("i1", token("a", 0))) == ()
    assert [output.attempt for output in outputs(node.step("i1", token("a", 0, attempt=2)))] == [2]


def test_an_abort_of_another_attempt_is_ignored() -> None:
    node = NodeUnderTest("i1")
    node.submit("a", attempt=2)
    assert node.command(AbortRequest(request_id=RequestId("a"), attempt=1)) == []


def test_a_request_for_an_instance_that_is_not_ready_is_returned() -> None:
    node = NodeUnderTest()
    node.command(load_command())
    returned = reports(node.submit("a"))[0]
    assert isinstance(returned, RequestReturned)
    assert "i1" in returned.message


def test_a_resumed_request_keeps_its_place_in_time() -> None:
    node = NodeUnderTest("i1")
    submit = only(node.submit("a", so_far=(5, 6), attempt=2), SubmitToEngine)
    assert submit.request.output_tokens == (5, 6)
    assert submit.request.stop_token_ids == MODEL.stop_token_ids


def test_a_broken_iteration_returns_every_request_and_drops_the_instance() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    node.submit("b")
    broke = node.tell(StepBroke(instance_id=InstanceId("i1"), error="EngineError", message="boom"))
    first, *rest = reports(broke)
    assert isinstance(first, Heartbeat), "said first, or they would be sent here again"
    assert first.instances == ()
    assert [r.request_id for r in rest if isinstance(r, RequestReturned)] == ["a", "b"]
    only(broke, UnloadInstance)
    gone = reports(node.tell(InstanceGone(instance_id=InstanceId("i1"))))[0]
    assert isinstance(gone, InstanceGone)
    assert gone.message == "boom"


I1 = InstanceId("i1")
LOST = InstanceGone(instance_id=I1, error="EngineError", message="killed")
LOST_AMID_A_STEP = StepBroke(instance_id=I1, error="EngineError", message="killed amid a step")


def test_an_idle_instance_that_ends_is_unlisted_at_once_and_gone_with_the_reason() -> None:
    node = NodeUnderTest("i1")
    told = node.tell(LOST)
    (beat,) = reports(told)
    assert isinstance(beat, Heartbeat)
    assert beat.instances == ()
    only(told, UnloadInstance)
    gone = InstanceGone(instance_id=I1, error="EngineError", message="killed")
    assert reports(node.tell(InstanceGone(instance_id=I1))) == [gone]
    assert node.tell(LOST) == [], "told late, of what is gone"
    assert isinstance(reports(node.load())[0], InstanceLoaded), "the node is well"


@pytest.mark.parametrize("told", [(LOST, LOST_AMID_A_STEP), (LOST_AMID_A_STEP, LOST)])
def test_an_instance_that_ends_amid_a_step_ends_once_and_the_next_turn_is_anothers(
    told: tuple[NodeEvent, NodeEvent],
) -> None:
    """The step and the watch over the process both report the end."""
    node = NodeUnderTest("i1", "i2")
    node.submit("a", "i1")
    node.submit("b", "i2")
    actions = [action for event in told for action in node.tell(event)]
    assert [r.request_id for r in reports(actions) if isinstance(r, RequestReturned)] == ["a"]
    only(actions, UnloadInstance)
    assert only(actions, StartStep).instance_id == "i2"


def test_an_instance_that_ends_before_its_load_is_told_is_never_listed() -> None:
    node = NodeUnderTest()
    node.command(load_command())
    assert node.tell(LOST) == []
    actions = node.tell(loaded(I1))
    only(actions, UnloadInstance)
    assert reports(actions) == []
    gone = InstanceGone(instance_id=I1, error="EngineError", message="killed")
    assert reports(node.tell(InstanceGone(instance_id=I1))) == [gone]


def test_a_request_that_the_engine_will_not_take_is_returned() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    broke = SubmitBroke(request_id=RequestId("a"), attempt=1, error="EngineError", message="no")
    assert isinstance(reports(node.tell(broke))[0], RequestReturned)


def test_unloading_returns_what_still_runs() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    actions = node.command(UnloadInstance(instance_id=InstanceId("i1")))
    assert isinstance(reports(actions)[0], RequestReturned)
    only(actions, UnloadInstance)
    assert node.core.instances() == ()


def test_an_instance_unloaded_while_it_loads_goes_as_soon_as_it_has() -> None:
    node = NodeUnderTest()
    only(node.command(load_command()), LoadInstance)
    assert node.command(UnloadInstance(instance_id=InstanceId("i1"))) == []
    actions = node.tell(loaded(InstanceId("i1")))
    only(actions, UnloadInstance)
    assert reports(actions) == []


def test_a_failed_load_is_reported_and_the_id_is_free_again() -> None:
    node = NodeUnderTest()
    node.command(load_command())
    broke = LoadFailed(instance_id=InstanceId("i1"), error="TornModel", message="torn", hint="h")
    failed = reports(node.tell(broke))[0]
    assert isinstance(failed, LoadFailed)
    assert isinstance(reports(node.load())[0], InstanceLoaded)


def test_unloading_what_is_not_there_reports_it_gone() -> None:
    gone = reports(NodeUnderTest().command(UnloadInstance(instance_id=InstanceId("i9"))))[0]
    assert isinstance(gone, InstanceGone)


def test_a_lost_link_aborts_requests_and_imports_but_keeps_what_is_loaded() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    node.command(load_command("i2"))
    only(node.command(ImportModel(operation_id=OperationId("op"), source="pkg://x/y")), ImportModel)
    actions = node.tell(LinkClosed(reason="reset"))
    only(actions, AbortInEngine)
    only(actions, CancelImport)
    assert reports(actions) == []
    assert [i.instance_id for i in node.core.instances()] == ["i1"]
    only(node.tell(loaded(InstanceId("i2"))), UnloadInstance)
    assert reports(node.step("i1", token("a", 0))) == [], "nobody hears it"


def test_a_new_link_begins_with_what_is_loaded_now() -> None:
    """An instance that broke after the hello is not in it."""
    node = NodeUnderTest("i1")
    node.submit("a")
    node.tell(LinkClosed(reason="reset"))
    assert [r.instance_id for r in node.core.instances()] == ["i1"]
    node.tell(StepBroke(instance_id=InstanceId("i1"), error="EngineError", message="boom"))
    first = reports(node.tell(LinkOpened()))[0]
    assert isinstance(first, Heartbeat)
    assert first.instances == ()


def test_a_load_waits_for_memory_that_the_controller_does_not_know_to_be_taken() -> None:
    """The old load goes on after its link broke; the new controller takes its memory for free."""
    node = NodeUnderTest()
    node.command(load_command("old"))
    node.reconnect()
    assert not [a for a in node.command(load_command("new")) if isinstance(a, LoadInstance)]
    only(node.tell(loaded(InstanceId("old"))), UnloadInstance)
    gone = node.tell(InstanceGone(instance_id=InstanceId("old")))
    assert only(gone, LoadInstance).instance_id == "new"
    node.command(UnloadInstance(instance_id=InstanceId("new")))
    again = node.command(load_command("newer"))
    assert only(again, LoadInstance).instance_id == "newer", "what the controller unloads, it books"


def test_a_load_that_waits_is_given_up_at_once() -> None:
    node = NodeUnderTest("old")
    node.command(UnloadInstance(instance_id=InstanceId("old")))
    node.reconnect()
    node.command(load_command("new"))
    gone = reports(node.command(UnloadInstance(instance_id=InstanceId("new"))))
    assert gone == [InstanceGone(instance_id=InstanceId("new"))]
    after = node.tell(InstanceGone(instance_id=InstanceId("old")))
    assert not [a for a in after if isinstance(a, LoadInstance)]


def test_blocks_in_use_are_those_after_the_last_abort() -> None:
    node = NodeUnderTest("i1")
    node.submit("a")
    node.step("i1", token("a", 0))
    node.command(AbortRequest(request_id=RequestId("a"), attempt=1))
    node.step("i1")
    assert node.core.instances()[0].kv_blocks_used == 1
    node.tell(AbortFinished(instance_id=InstanceId("i1"), kv_blocks_used=0))
    assert node.core.instances()[0].kv_blocks_used == 0
