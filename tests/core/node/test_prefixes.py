"""The node core and cached prefixes: what a request finds, what the controller is told of."""

from dataclasses import replace

import pytest

from mesh.core.node import local_cache
from mesh.domain.actions import AskPrefixes, NodeAction, StartStep, SubmitToEngine
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.messages import (
    AbortRequest,
    InstanceGone,
    InstanceLoaded,
    PrefixesChanged,
    PrefixMissed,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.node_events import (
    HeartbeatDue,
    LinkClosed,
    LinkOpened,
    PrefixesTold,
    StepFinished,
    SubmitBroke,
    SubmitFinished,
)
from mesh.domain.request import RequestOrder
from mesh.domain.slo import Slo
from mesh.domain.steps import PrefixChange
from tests.core.cells import of_kind, only, request, step_result
from tests.core.nodes import NodeUnderTest, load_command, reports, token
from tests.core.nodes import loaded as loaded_told

I1 = InstanceId("i1")
CHANGE = PrefixChange(came=(7, 8), went=(3,))


def submitted(node: NodeUnderTest, cached: int = 0, salt: str | None = "") -> list[NodeAction]:
    order = RequestOrder(
        request=replace(request("a", prompt=range(100)), cache_salt=salt),
        attempt=1,
        slo=Slo(),
        age_s=0.0,
        due_in_s=1.0,
        cached_tokens=cached,
    )
    return node.command(SubmitRequest(instance_id=I1, order=order))


def found(node: NodeUnderTest, tokens: int) -> list[NodeAction]:
    done = SubmitFinished(request_id=RequestId("a"), attempt=1, cached_tokens=tokens)
    return node.tell(done)


def loaded() -> NodeUnderTest:
    return NodeUnderTest("i1")


def test_a_turn_is_given_for_what_is_left_of_a_prompt() -> None:
    node = loaded()
    asked = submitted(node, cached=64)
    assert only(asked, SubmitToEngine).request.cache_salt == ""
    prefill = only(asked, StartStep).prefill
    assert isinstance(prefill, int)
    assert prefill >= 36
    (local,) = node.core._node.instances[I1].requests.values()
    assert local.prefill_left == 36
    assert not reports(found(node, 64))
    assert local.prefill_left == 36
    assert not reports(found(node, 96)), "more than was counted on is nobody's trouble"
    assert local.prefill_left == 4


def test_what_is_gone_when_a_request_comes_is_told() -> None:
    node = loaded()
    submitted(node, cached=64)
    missed = only(reports(found(node, 32)), PrefixMissed)
    assert missed == PrefixMissed(request_id=RequestId("a"), attempt=1, cached_tokens=32)
    (local,) = node.core._node.instances[I1].requests.values()
    assert local.prefill_left == 68


def test_changes_are_told_as_they_come_and_all_of_it_to_a_new_controller() -> None:
    node = loaded()
    beat = HeartbeatDue(rss_bytes=1, engine_bytes=1, kv_blocks_cached=((I1, 5),))
    assert not of_kind(node.tell(beat), AskPrefixes), "nothing that it does is shared"
    submitted(node)
    result = step_result(
        prefill_tokens=1,
        prefill_left=((RequestId("a"), 99),),
        elapsed_s=0.01,
        prefixes=PrefixChange(came=(3, 4)),
    )
    told = reports(node.tell(StepFinished(instance_id=I1, result=result)))
    assert only(told, PrefixesChanged).change.came == (3, 4)
    assert of_kind(node.tell(beat), AskPrefixes)
    told = reports(node.tell(PrefixesTold(changes=((I1, CHANGE), (InstanceId("gone"), CHANGE)))))
    assert only(told, PrefixesChanged) == PrefixesChanged(instance_id=I1, change=CHANGE)
    (whole,) = node.core.instances()
    assert (sorted(whole.prefixes), whole.kv_blocks_cached) == ([4, 7, 8], 5)
    assert node.heartbeat().instances[0].prefixes == (), "that would be much, every second"


def test_what_an_unloaded_instance_left_is_told_until_the_next_one_is_loaded() -> None:
    node = loaded()
    submitted(node)
    node.command(UnloadInstance(instance_id=I1))
    node.tell(InstanceGone(instance_id=I1))
    beat = HeartbeatDue(rss_bytes=1, engine_bytes=1)
    assert of_kind(node.tell(beat), AskPrefixes)
    told = only(reports(node.tell(PrefixesTold(changes=((I1, CHANGE),)))), PrefixesChanged)
    assert told == PrefixesChanged(instance_id=I1, change=CHANGE, left_to=DeploymentName("chat"))
    node.tell(LinkClosed(reason="lost"))
    anew = only(reports(node.tell(LinkOpened())), PrefixesChanged)
    came = PrefixChange(came=CHANGE.came)
    assert anew == PrefixesChanged(instance_id=I1, change=came, left_to=DeploymentName("chat"))
    again = InstanceId("i-2")
    node.command(load_command(again))
    node.tell(replace(loaded_told(again), prefixes=(7, 8)))
    (whole,) = node.core.instances()
    assert whole.prefixes == (7, 8)
    assert of_kind(node.tell(beat), AskPrefixes), "it has something to tell of"
    assert not reports(node.tell(PrefixesTold(changes=((I1, CHANGE),))))


def test_of_more_digests_than_are_kept_the_newest_are_known() -> None:
    node = loaded()
    most = local_cache.DIGESTS_MAX
    node.tell(PrefixesTold(changes=((I1, PrefixChange(came=tuple(range(most + 2)))),)))
    (whole,) = node.core.instances()
    assert whole.prefixes == tuple(range(2, most + 2))


def test_no_more_is_told_of_a_load_than_is_known() -> None:
    node = loaded()
    again = InstanceId("i-2")
    node.command(load_command(again))
    found = tuple(range(local_cache.DIGESTS_MAX + 5))
    told = only(reports(node.tell(replace(loaded_told(again), prefixes=found))), InstanceLoaded)
    assert told.prefixes == found[5:]


def second(node: NodeUnderTest, name: str = "b") -> list[NodeAction]:
    """Another answer to the prompt of `a`, of which three blocks are full."""
    asked = replace(request(name, prompt=range(100)), cache_salt="", first=RequestId("a"))
    order = RequestOrder(
        request=asked, attempt=1, slo=Slo(), age_s=0.0, due_in_s=1.0, cached_tokens=96
    )
    return node.command(SubmitRequest(instance_id=I1, order=order))


def test_another_answer_is_computed_once_its_prompt_has_been() -> None:
    node = loaded()
    submitted(node)
    assert not of_kind(second(node), SubmitToEngine)
    node.step("i1", prefill_left={"a": 40}, prefill_tokens=60)
    after = node.step("i1", token("a", 0), prefill_tokens=40)
    assert only(after, SubmitToEngine).request.request_id == "b"
    turn = only(after, StartStep)
    assert turn.prefill == 4, "all that is left of it"
    assert not of_kind(node.step("i1", token("b", 0), prefill_tokens=4), SubmitToEngine)


@pytest.mark.parametrize("ends", [AbortRequest, SubmitBroke])
def test_the_next_answer_computes_the_prompt_where_the_first_is_gone(ends: type) -> None:
    """The last one waits for that, and nothing counts as missed."""
    node = loaded()
    submitted(node)
    second(node)
    second(node, "c")
    if ends is AbortRequest:
        after = node.command(AbortRequest(request_id=RequestId("a"), attempt=1))
    else:
        after = node.tell(
            SubmitBroke(request_id=RequestId("a"), attempt=1, error="EngineError", message="no")
        )
    assert only(after, SubmitToEngine).request.request_id == "b"
    found = SubmitFinished(request_id=RequestId("b"), attempt=1, cached_tokens=0)
    assert not of_kind(reports(node.tell(found)), PrefixMissed)
    after = node.step("i1", token("b", 0), prefill_tokens=100)
    assert only(after, SubmitToEngine).request.request_id == "c"


def test_an_answer_that_comes_late_is_computed_at_once() -> None:
    node = loaded()
    submitted(node)
    node.step("i1", token("a", 0), prefill_tokens=100)
    assert of_kind(second(node), SubmitToEngine)
