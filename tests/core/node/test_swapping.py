"""The node core and weights: who is on the device, what waits for room, what the cell is told."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.core.node.core import NodeCore
from mesh.domain.actions import NodeAction, StartMeasure, StartStep, SwapWeights
from mesh.domain.ids import InstanceId
from mesh.domain.limits import NodeLimits
from mesh.domain.messages import (
    Heartbeat,
    InstanceGone,
    KvResized,
    LoadInstance,
    RequestReturned,
    ResizeKv,
    UnloadInstance,
)
from mesh.domain.node_events import (
    HeartbeatDue,
    LinkClosed,
    LinkOpened,
    MeasureFinished,
    SwapFinished,
)
from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import FinishReason
from mesh.domain.slo import Slo, best_effort
from mesh.policy.rules.swapping import WHOLE, Swapping
from mesh.policy.rules.turns import name_of
from tests.core.cells import FOOTPRINT, of_kind, only
from tests.core.nodes import NodeUnderTest, load_command, reports, token
from tests.support.profiles import profile

KV_BYTES = FOOTPRINT.size(16).kv_bytes
WEIGHTS_BYTES = FOOTPRINT.weights_bytes
EIGHTHS = Swapping(parts=8)
SOON, LATER = Slo(ttft_s=1.0), Slo(ttft_s=60.0)


def swapping_node(*names: str, weights: int = 1, kv: int = 0) -> NodeUnderTest:
    """These are loaded, beside room for so many models' weights, and for so many caches more."""
    node = NodeUnderTest(turns=WHOLE)
    room_bytes = (len(names) + kv) * KV_BYTES + weights * WEIGHTS_BYTES
    node.tell(LinkOpened(rule=swap_rule(room_bytes)))
    for name in names:
        node.load(name, command=swapped_command(name))
    return node


def swap_rule(swap_bytes: int) -> NodeRule:
    return NodeRule(turn=name_of(WHOLE), turn_s_max=0.0, swap_bytes=swap_bytes)


def swapped_command(name: str) -> LoadInstance:
    return replace(load_command(name), swapped_bytes=KV_BYTES)


def swaps(actions: Sequence[NodeAction]) -> list[tuple[str, bool]]:
    return [(a.instance_id, a.share == 1.0) for a in of_kind(actions, SwapWeights)]


def shares(actions: Sequence[NodeAction]) -> list[tuple[str, float]]:
    return [(a.instance_id, a.share) for a in of_kind(actions, SwapWeights)]


def swapped(node: NodeUnderTest, name: str, resident: bool, error: str = "") -> list[NodeAction]:
    event = SwapFinished(instance_id=InstanceId(name), error=error)
    return node.tell(event)


def steps(actions: Sequence[NodeAction]) -> list[str]:
    return [action.instance_id for action in of_kind(actions, StartStep)]


def test_weights_come_when_a_request_does_and_it_computes_once_they_are_there() -> None:
    node = swapping_node("i1")
    assert [report.out for report in node.heartbeat().instances] == [True]
    actions = node.submit("r1")
    assert (swaps(actions), steps(actions)) == ([("i1", True)], [])
    actions = swapped(node, "i1", True)
    assert steps(actions) == ["i1"]
    assert [report.out for report in only(reports(actions), Heartbeat).instances] == [False]


def test_the_cell_is_told_when_weights_begin_to_move_and_when_they_are_there() -> None:
    node = swapping_node("i1")
    beat = only(reports(node.submit("r1")), Heartbeat)
    assert [(report.out, report.swapping) for report in beat.instances] == [(True, True)]
    beat = only(reports(swapped(node, "i1", True)), Heartbeat)
    assert [(report.out, report.swapping) for report in beat.instances] == [(False, False)]


def test_who_is_due_last_makes_room_when_its_turn_is_over() -> None:
    node = swapping_node("i1", "i2")
    node.submit("r1", "i1", slo=LATER)
    swapped(node, "i1", True)
    assert swaps(node.submit("r2", "i2", slo=SOON)) == []
    actions = node.step("i1", token("r1", 0))
    assert (swaps(actions), steps(actions)) == ([("i1", False)], [])
    assert swaps(swapped(node, "i1", False)) == [("i2", True)]
    assert steps(swapped(node, "i2", True)) == ["i2"]


def test_the_next_one_comes_while_another_computes() -> None:
    node = swapping_node("i1", "i2", weights=2)
    node.submit("r1", "i1")
    assert steps(swapped(node, "i1", True)) == ["i1"]
    assert swaps(node.submit("r2", "i2")) == [("i2", True)]


def test_what_stays_of_an_instance_that_is_out_leaves_others_less_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.core.nodes.FOOTPRINT", replace(FOOTPRINT, stays_bytes=1))
    node = swapping_node("i1", "i2", weights=2)
    node.submit("r1", "i1")
    assert steps(swapped(node, "i1", True)) == ["i1"]
    assert swaps(node.submit("r2", "i2")) == []
    assert swaps(node.step("i1", token("r1", 0))) == [("i1", False)]


def test_best_effort_waits_while_the_weights_of_requests_with_limits_come() -> None:
    node = swapping_node("i1", "i2", weights=2)
    node.submit("r1", "i1", slo=best_effort("batch", 60.0))
    swapped(node, "i1", True)
    assert swaps(node.submit("r2", "i2", slo=SOON)) == [("i2", True)]
    assert steps(node.step("i1", token("r1", 0))) == []
    assert steps(swapped(node, "i2", True)) == ["i2"]


def test_a_cache_that_grows_waits_for_idle_weights_to_make_room() -> None:
    node = swapping_node("i1")
    node.submit("r1")
    swapped(node, "i1", True)
    assert (
        of_kind(node.command(ResizeKv(instance_id=InstanceId("i1"), kv_blocks=32)), ResizeKv) == []
    )
    actions = node.step("i1", token("r1", 0))
    assert swaps(actions) == [("i1", False)]
    assert only(swapped(node, "i1", False), ResizeKv).kv_blocks == 32


def test_a_load_waits_for_weights_to_make_room() -> None:
    node = swapping_node("i1")
    node.submit("r1")
    swapped(node, "i1", True)
    node.step("i1", token("r1", 0))
    assert node.command(swapped_command("i2")) == []
    actions = node.step("i1", token("r1", 1))
    assert swaps(actions) == [("i1", False)]
    assert only(swapped(node, "i1", False), LoadInstance).instance_id == "i2"


def test_a_resize_waits_while_the_weights_are_on_their_way() -> None:
    node = swapping_node("i1", kv=1)
    node.submit("r1")
    assert node.command(ResizeKv(instance_id=InstanceId("i1"), kv_blocks=24)) == []
    assert only(swapped(node, "i1", True), ResizeKv).kv_blocks == 24
    resized = KvResized(instance_id=InstanceId("i1"), kv_blocks=24, elapsed_s=0.1)
    assert resized in reports(node.tell(resized))


def test_where_weights_come_by_parts_a_resize_waits_for_none_of_them() -> None:
    node = NodeUnderTest(turns=EIGHTHS)
    rule = replace(swap_rule(2 * KV_BYTES + WEIGHTS_BYTES), turn=name_of(EIGHTHS))
    node.tell(LinkOpened(rule=rule))
    node.load("i1", command=swapped_command("i1"))
    assert shares(node.submit("r1")) == [("i1", 0.125)]
    assert only(node.command(ResizeKv(instance_id=InstanceId("i1"), kv_blocks=24)), ResizeKv)
    assert shares(swapped(node, "i1", True)) == [("i1", 0.25)]


def test_an_unload_waits_for_the_weights_that_are_on_their_way() -> None:
    node = swapping_node("i1")
    node.submit("r1")
    actions = node.command(UnloadInstance(instance_id=InstanceId("i1")))
    assert of_kind(actions, UnloadInstance) == []
    assert only(reports(actions), RequestReturned).request_id == "r1"
    only(swapped(node, "i1", True), UnloadInstance)
    assert reports(node.tell(InstanceGone(instance_id=InstanceId("i1"))))


def test_a_swap_that_fails_is_tried_again_and_at_last_the_instance_goes() -> None:
    node = swapping_node("i1")
    node.submit("r1")
    for _ in range(2):
        assert swaps(swapped(node, "i1", True, "EngineError")) == [("i1", True)]
    actions = swapped(node, "i1", True, "OutOfMemory")
    assert only(reports(actions), RequestReturned).error == "OutOfMemory"
    assert only(actions, UnloadInstance).instance_id == "i1"


@pytest.mark.parametrize("swap_bytes", [0, 1 << 40])
def test_what_is_out_goes_where_the_next_controller_does_not_swap(swap_bytes: int) -> None:
    node = swapping_node("i1")
    node.tell(LinkClosed(reason="lost"))
    actions = node.tell(LinkOpened(rule=swap_rule(swap_bytes)))
    assert len(of_kind(actions, UnloadInstance)) == (not swap_bytes)


def test_weights_that_leave_while_the_controller_changes_take_their_instance_along() -> None:
    node = swapping_node("i1", "i2")
    node.submit("r1", "i1", slo=LATER)
    swapped(node, "i1", True)
    node.submit("r2", "i2", slo=SOON)
    assert swaps(node.step("i1", token("r1", 0))) == [("i1", False)]
    node.tell(LinkClosed(reason="lost"))
    node.tell(LinkOpened(rule=swap_rule(0)))
    node.submit("r3", "i1")
    actions = swapped(node, "i1", False)
    assert only(actions, UnloadInstance).instance_id == "i1"
    assert only(reports(actions), RequestReturned).request_id == "r3"


def test_the_node_takes_off_the_pool_what_its_process_has_come_to_take_beside_it() -> None:
    node = swapping_node("i1")
    for _ in range(2):
        node.tell(HeartbeatDue(rss_bytes=1, engine_bytes=0))
    assert swaps(node.submit("r1")) == [], "the weights lack one byte"


def test_weights_on_their_way_are_not_taken_for_memory_beside_the_engines() -> None:
    node = swapping_node("i1")
    node.submit("r1")
    for _ in range(2):
        node.tell(HeartbeatDue(rss_bytes=WEIGHTS_BYTES, engine_bytes=0))
    assert node.core.base_bytes == 0


def test_no_weights_move_while_the_cache_of_their_instance_is_resized() -> None:
    node = swapping_node("i1", kv=1)
    node.command(ResizeKv(instance_id=InstanceId("i1"), kv_blocks=24))
    assert swaps(node.submit("r1")) == []
    actions = node.tell(KvResized(instance_id=InstanceId("i1"), kv_blocks=24, elapsed_s=0.1))
    assert swaps(actions) == [("i1", True)]


def test_a_growth_of_one_that_is_unloaded_takes_no_room() -> None:
    node = swapping_node("i1", "i2")
    node.submit("r1", "i1")
    swapped(node, "i1", True)
    node.command(ResizeKv(instance_id=InstanceId("i2"), kv_blocks=32))
    node.command(UnloadInstance(instance_id=InstanceId("i2")))
    assert swaps(node.step("i1", token("r1", 0))) == []


def test_a_survey_at_rest_ends_where_its_weights_leave_and_others_go_on() -> None:
    node = NodeUnderTest()
    node.core = NodeCore(limits=NodeLimits(deadline_margin_s_max=0.0, primed_tokens_max=1))
    node.tell(LinkOpened(rule=swap_rule(2 * KV_BYTES + WEIGHTS_BYTES)))
    for name in ("i1", "i2"):
        node.load(name, command=replace(swapped_command(name), profile=profile(scaled_from="a")))
    node.submit("r1", "i1")
    swapped(node, "i1", True)
    node.step("i1", token("r1", 0, finish=FinishReason.STOP))
    actions = node.tell(HeartbeatDue(rss_bytes=0))
    for _ in range(4):
        assert only(actions, StartMeasure).instance_id == "i1"
        actions = node.tell(MeasureFinished(instance_id=InstanceId("i1"), elapsed_s=0.01))
    node.submit("r2", "i2")
    leaving = node.tell(MeasureFinished(instance_id=InstanceId("i1"), elapsed_s=0.01))
    assert swaps(leaving) == [("i1", False)]
    node.tell(HeartbeatDue(rss_bytes=0))
    swapped(node, "i1", False)
    swapped(node, "i2", True)
    node.step("i2", token("r2", 0, finish=FinishReason.STOP))
    assert only(node.tell(HeartbeatDue(rss_bytes=0)), StartMeasure).instance_id == "i2"
    for _ in range(4):
        actions = node.tell(MeasureFinished(instance_id=InstanceId("i2"), elapsed_s=0.01))
        assert only(actions, StartMeasure).instance_id == "i2"


def test_nothing_is_learned_of_an_iteration_beside_a_swap() -> None:
    node = swapping_node("i1", "i2", weights=2)
    node.submit("r1", "i1")
    swapped(node, "i1", True)
    node.submit("r2", "i2")
    node.now_s += 60.0
    swapped(node, "i2", True)
    node.step("i1", token("r1", 0))
    told = node.heartbeat().instances[0]
    assert (told.correction, told.off_p95) == (1.0, 0.0)


def test_the_heartbeat_after_a_swap_says_what_came_in_which_time() -> None:
    node = swapping_node("i1")
    node.submit("r1")
    node.now_s += 0.5
    beat = only(reports(swapped(node, "i1", True)), Heartbeat)
    assert (beat.swapped_bytes, beat.swapped_s) == (WEIGHTS_BYTES, 0.5)
    assert node.heartbeat().swapped_bytes == 0


def test_best_effort_has_its_weights_come_and_gives_them_up_to_others() -> None:
    node = swapping_node("i1", "i2")
    assert swaps(node.submit("r1", "i1", slo=best_effort("batch", 60.0))) == [("i1", True)]
    assert steps(swapped(node, "i1", True)) == ["i1"]
    assert swaps(node.submit("r2", "i2", slo=LATER)) == []
    assert swaps(node.step("i1", token("r1", 0))) == [("i1", False)]


def test_weights_come_by_parts_and_the_cell_is_told_of_each() -> None:
    node = NodeUnderTest(turns=EIGHTHS)
    rule = NodeRule(turn=name_of(EIGHTHS), turn_s_max=0.0, swap_bytes=2 * KV_BYTES + WEIGHTS_BYTES)
    node.tell(LinkOpened(rule=rule))
    for name in ("i1", "i2"):
        node.load(name, command=swapped_command(name))
    assert shares(node.submit("r1", "i1", slo=LATER)) == [("i1", 0.125)]
    for eighth in range(1, 4):
        node.now_s += 0.5
        actions = swapped(node, "i1", True)
        assert shares(actions) == [("i1", (eighth + 1) / 8)]
        beat = only(reports(actions), Heartbeat)
        assert beat.swapped_bytes == 0, "not all have come"
        told = {report.instance_id: (report.here, report.swaps_to) for report in beat.instances}
        assert told[InstanceId("i1")] == (eighth / 8, (eighth + 1) / 8)
    assert shares(node.submit("r2", "i2", slo=SOON)) == []
    assert shares(swapped(node, "i1", True)) == [("i2", 0.125)], "it is due sooner"
    for _ in range(4):
        actions = swapped(node, "i2", True)
    assert shares(actions) == [("i1", 0.0)], "what i2 lacks"
    actions = swapped(node, "i1", False)
    for _ in range(4):
        assert steps(actions) == []
        actions = swapped(node, "i2", True)
    assert steps(actions) == ["i2"]


def test_a_wait_amid_a_copy_is_learned_once() -> None:
    node = NodeUnderTest(turns=EIGHTHS)
    rule = NodeRule(turn=name_of(EIGHTHS), turn_s_max=0.0, swap_bytes=KV_BYTES + WEIGHTS_BYTES)
    node.tell(LinkOpened(rule=rule))
    node.load("i1", command=swapped_command("i1"))
    node.submit("r1", "i1")
    for eighth in range(8):
        node.now_s += 3.1 if eighth == 7 else 0.1
        actions = swapped(node, "i1", True)
    beat = only(reports(actions), Heartbeat)
    assert beat.swapped_bytes == WEIGHTS_BYTES
    assert beat.swapped_s == pytest.approx(3.8)
