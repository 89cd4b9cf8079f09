"""The controller core on the request path: queue, place, stream, move, refuse."""

from dataclasses import replace
from typing import Any

import pytest

from mesh.core.controller.state.context import VALIDATIONS_OF_MANY
from mesh.domain.actions import DeliverTokens, RefuseRequest, SetTimer, TellAccepted, TellWaiting
from mesh.domain.events import (
    CancelRequested,
    DrainRequested,
    KeepAliveExpired,
    NodeDisconnected,
    PlaceRetryDue,
    RetryLoadDue,
    ShutdownRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.lifecycle import DeploymentState, InstanceState
from mesh.domain.limits import CellLimits
from mesh.domain.messages import (
    AbortRequest,
    InstanceGone,
    LoadFailed,
    LoadInstance,
    LoadProgress,
    PrefixMissed,
    RequestReturned,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import Request
from mesh.domain.slo import Slo
from tests.core.admission import SLOW, BusyCell, instance, node
from tests.core.cells import (
    MIB,
    CellUnderTest,
    commands,
    deployment,
    hello,
    of_kind,
    one_node,
    only,
    request,
)

OP = OperationId("op-1")


def serving_cell(**limits: Any) -> tuple[CellUnderTest, int, InstanceId]:
    """A cell whose one node has loaded `chat` and runs `r1`."""
    cell, link = one_node(deployment(), limits=CellLimits(**limits))
    return cell, link, cell.bring_up(link).instance_id


def returned(attempt: int) -> RequestReturned:
    return RequestReturned(
        request_id=RequestId("r1"), attempt=attempt, error="OutOfMemory", message="evicted"
    )


def test_first_request_scales_from_zero_and_is_submitted_when_the_instance_is_up() -> None:
    cell, link = one_node(deployment())
    load = commands(cell.invoke(), LoadInstance)[0]
    assert load.kv_blocks * 32 >= load.context_tokens_max
    waiting = cell.report(
        link, LoadProgress(instance_id=load.instance_id, phase="compile", share=0.5)
    )
    assert only(waiting, TellWaiting).phase == "compile"
    cell.now_s += 2.0
    submit = commands(cell.loaded(link, load.instance_id), SubmitRequest)[0]
    assert submit.order.age_s == 2.0
    assert submit.order.due_in_s == Slo().ttft_s - 2.0, "the load counts like any other wait"


def test_tokens_reach_the_client_in_order_and_the_last_one_ends_the_request() -> None:
    cell, link, _ = serving_cell()
    assert only(cell.tokens(link, "r1", [7, 8]), DeliverTokens).outputs.token_ids == (7, 8)
    last = cell.tokens(link, "r1", [9], first=2, finish=FinishReason.STOP)
    assert only(last, DeliverTokens).outputs.finish is FinishReason.STOP
    assert only(last, DeliverTokens).node_id == "n1"
    assert cell.tokens(link, "r1", [10], first=3) == [], "an ended request gets no more"
    assert cell.core.cell.served == 1


def test_a_gap_in_the_tokens_is_never_delivered() -> None:
    cell, link, _ = serving_cell()
    actions = cell.tokens(link, "r1", [9], first=1)
    assert of_kind(actions, DeliverTokens) == []
    assert commands(actions, SubmitRequest)[0].order.attempt == 2


def test_tokens_of_an_earlier_attempt_are_dropped() -> None:
    cell, link, _ = serving_cell()
    cell.report(link, returned(1))
    assert cell.tokens(link, "r1", [7], attempt=1) == []
    assert only(cell.tokens(link, "r1", [7], attempt=2), DeliverTokens).outputs.token_ids == (7,)


def test_requests_of_a_lost_node_continue_elsewhere_after_their_tokens_so_far() -> None:
    cell, link, _ = serving_cell()
    other, _ = cell.join(hello("n2", run_id="run-2"))
    cell.tokens(link, "r1", [7, 8])
    load = commands(cell.tell(NodeDisconnected(link_id=link, reason="reset")), LoadInstance)[0]
    submit = commands(cell.loaded(other, load.instance_id), SubmitRequest)[0]
    assert submit.order.output_tokens == (7, 8)
    assert submit.order.attempt == 2
    delivered = only(cell.tokens(other, "r1", [9], first=2, attempt=2), DeliverTokens)
    assert delivered.outputs.first_index == 2


def test_requests_of_the_last_node_wait_for_another_and_fail_with_the_reason() -> None:
    cell, link, _ = serving_cell()
    cell.now_s += 5.0
    cell.retry()
    lost = cell.tell(NodeDisconnected(link_id=link, reason="reset"))
    timer = only(lost, SetTimer).timer
    assert isinstance(timer, PlaceRetryDue)
    cell.now_s += 29.0
    waits_on = cell.tell(timer)
    assert of_kind(waits_on, RefuseRequest) == [], "it was admitted, which is a promise"
    assert only(waits_on, SetTimer).timer == timer
    cell.now_s += 1.0
    assert only(cell.tell(timer), RefuseRequest).reason is RefusalReason.NODE_LOST
    assert cell.tell(timer) == [], "a request is refused once"


def test_a_request_is_submitted_at_most_attempts_max_times() -> None:
    cell, link, _ = serving_cell(attempts_max=2)
    returned = RequestReturned(
        request_id=RequestId("r1"), attempt=1, error="EngineError", message="x"
    )
    assert commands(cell.report(link, returned), SubmitRequest)[0].order.attempt == 2
    second = RequestReturned(
        request_id=RequestId("r1"), attempt=2, error="EngineError", message="x"
    )
    assert only(cell.report(link, second), RefuseRequest).reason is RefusalReason.ENGINE_FAILED


def test_a_broken_instance_gives_its_requests_back_and_is_loaded_anew() -> None:
    cell, link, instance_id = serving_cell()
    actions = cell.report(
        link, InstanceGone(instance_id=instance_id, error="EngineError", message="boom")
    )
    assert len(commands(actions, LoadInstance)) == 1
    assert of_kind(actions, RefuseRequest) == []


def test_a_cancelled_request_is_aborted_on_its_node_and_its_client_told_nothing() -> None:
    cell, link, _ = serving_cell()
    actions = cell.tell(CancelRequested(request_id=RequestId("r1")))
    assert commands(actions, AbortRequest) == [AbortRequest(request_id=RequestId("r1"), attempt=1)]
    assert of_kind(actions, RefuseRequest) == []
    assert cell.tokens(link, "r1", [7]) == []


def test_a_cancelled_request_makes_room_for_the_one_that_waits() -> None:
    cell, _, _ = serving_cell(batch_max=1)
    assert commands(cell.invoke(request("r2")), SubmitRequest) == []
    actions = cell.tell(CancelRequested(request_id=RequestId("r1")))
    assert commands(actions, SubmitRequest)[0].order.request.request_id == "r2"


def test_a_place_is_not_given_to_one_whose_client_goes_in_the_same_moment() -> None:
    cell, _, _ = serving_cell(batch_max=1)
    for name in ("r2", "r3"):
        assert commands(cell.invoke(request(name)), SubmitRequest) == []
    left = CancelRequested(request_id=RequestId("r1"), others=(RequestId("r2"),))
    (submitted,) = commands(cell.tell(left), SubmitRequest)
    assert submitted.order.request.request_id == "r3"


def test_a_few_of_many_places_are_given_at_once_and_the_rest_with_the_next_retry() -> None:
    """The next batch of those who leave is handled soon."""
    places = 2 * VALIDATIONS_OF_MANY
    cell, _, _ = serving_cell(batch_max=places)
    for n in range(2, 2 * places + 1):
        cell.invoke(request(f"r{n}"))
    first, *others = (RequestId(f"r{n}") for n in range(1, places + 1))
    left = cell.tell(CancelRequested(request_id=first, others=tuple(others)))
    assert len(commands(left, SubmitRequest)) == VALIDATIONS_OF_MANY
    assert cell.core.cell.retry_at_s is not None
    assert len(commands(cell.retry(), SubmitRequest)) == places - VALIDATIONS_OF_MANY


def test_unknown_deployments_and_oversized_prompts_are_refused_at_once() -> None:
    cell, _, _ = serving_cell()
    unknown = only(cell.invoke(request("r2", of="nope")), RefuseRequest)
    assert unknown.reason is RefusalReason.UNKNOWN_DEPLOYMENT
    long = only(cell.invoke(request("r3", prompt=range(512))), RefuseRequest)
    assert long.reason is RefusalReason.PROMPT_TOO_LONG
    assert "512" in long.message


def test_without_a_node_a_request_is_refused_at_once() -> None:
    refused = only(CellUnderTest(deployment()).invoke(), RefuseRequest)
    assert refused.reason is RefusalReason.NO_NODE
    assert refused.retry_after_s > 0


def test_the_queue_is_bounded() -> None:
    cell, _, _ = serving_cell(batch_max=1, queue_requests_max=1)
    assert of_kind(cell.invoke(request("r2")), RefuseRequest) == []
    assert only(cell.invoke(request("r3")), RefuseRequest).reason is RefusalReason.QUEUE_FULL


def test_a_request_without_a_place_is_refused_when_its_first_token_cannot_be_in_time() -> None:
    """Due after 2 s, of which its prefill and the delivery take 0.052 s; the one that runs is
    expected to end a little later than it is asked.
    """
    cell, _, _ = serving_cell(batch_max=1)
    cell.invoke(request("r2"))
    cell.now_s = 101.9
    assert of_kind(cell.retry(), RefuseRequest) == []
    cell.now_s = 101.95
    refused = only(cell.retry(), RefuseRequest)
    assert refused.reason is RefusalReason.QUEUE_TIMEOUT
    assert refused.retry_after_s > 0


def test_a_waiting_request_is_looked_at_again_when_it_would_have_to_begin() -> None:
    """At 101.948 s, 2 ms before the next try of all that wait."""
    cell, _, _ = serving_cell(batch_max=1)
    cell.invoke(request("r2"))
    cell.now_s = 101.9
    timers = [t.at_s for t in of_kind(cell.retry(), SetTimer) if isinstance(t.timer, PlaceRetryDue)]
    assert timers == [pytest.approx(101.948, abs=0.001)]
    cell.now_s = timers[0]
    assert of_kind(cell.retry(), RefuseRequest)


def test_requests_are_placed_while_there_is_memory_for_what_they_are_expected_to_need() -> None:
    """Two requests of 300 tokens need 20 blocks; a node with room for 16 takes one at a time."""
    cell, link = one_node(deployment(slo=Slo(ttft_s=60.0)), node=hello(memory_bytes=116 * MIB))
    load = commands(cell.invoke(request(prompt=[1] * 300)), LoadInstance)[0]
    assert load.kv_blocks == 16
    cell.invoke(request("r2", prompt=[1] * 300))
    submitted = commands(cell.loaded(link, load.instance_id), SubmitRequest)
    assert [s.order.request.request_id for s in submitted] == ["r1"]
    done = cell.tokens(link, "r1", [7], finish=FinishReason.LENGTH)
    assert commands(done, SubmitRequest)[0].order.request.request_id == "r2"


def test_an_idle_instance_is_parked_after_its_keep_alive_and_not_before() -> None:
    cell, link, instance_id = serving_cell()
    done = cell.tokens(link, "r1", [7], finish=FinishReason.STOP)
    first = only(done, SetTimer)
    assert first.at_s == cell.now_s + 1.0
    cell.now_s += 0.5
    cell.invoke(request("r2"))
    cell.now_s += 0.5
    assert cell.tell(first.timer) == [], "it is busy again"
    done = cell.tokens(link, "r2", [7], finish=FinishReason.STOP)
    second = only(done, SetTimer)
    assert cell.tell(first.timer) == [], "an old timer means nothing"
    assert isinstance(second.timer, KeepAliveExpired)
    cell.now_s = second.at_s
    (resize,) = commands(cell.tell(second.timer), ResizeKv)
    assert (resize.instance_id, resize.kv_blocks) == (instance_id, 1)
    assert cell.core.cell.instances[instance_id].state is InstanceState.PARKED


def test_memory_is_free_again_only_when_the_node_says_that_the_instance_is_gone() -> None:
    cell, link, instance_id = serving_cell()
    cell.tokens(link, "r1", [7], finish=FinishReason.STOP)
    cell.tell(DrainRequested(operation_id=OP, node_id=NodeId("n1")))
    station = cell.core.cell.nodes[hello().node_id].station
    assert station.tracked_bytes > station.promised_bytes == 0
    cell.report(link, InstanceGone(instance_id=instance_id))
    assert station.tracked_bytes == 0


def test_a_waiting_model_reclaims_the_memory_of_an_idle_one_before_its_keep_alive() -> None:
    cell, link = one_node(
        deployment("a", keep_alive_s=600),
        deployment("b", keep_alive_s=600),
        node=hello(memory_bytes=150 * MIB),
    )
    first = cell.bring_up(link, request("r1", of="a"))
    blocked = cell.invoke(request("r2", of="b"))
    assert commands(blocked, UnloadInstance) == [], "a busy instance stays"
    done = cell.tokens(link, "r1", [7], finish=FinishReason.STOP)
    assert commands(done, UnloadInstance)[0].instance_id == first.instance_id
    gone = cell.report(link, InstanceGone(instance_id=first.instance_id))
    assert commands(gone, LoadInstance)[0].deployment == "b"


def test_a_model_that_no_node_can_hold_is_refused_with_both_sizes() -> None:
    cell = CellUnderTest(deployment())
    cell.join(hello(memory_bytes=50 * MIB))
    refused = only(cell.invoke(), RefuseRequest)
    assert refused.reason is RefusalReason.MEMORY_FULL
    assert "116 MiB" in refused.message
    assert "50.0 MiB" in refused.message


def test_failed_loads_are_retried_after_a_pause_then_refused_with_the_cause() -> None:
    patient = deployment(slo=Slo(ttft_s=10.0))
    cell, link = one_node(patient, limits=CellLimits(load_attempts_max=2))
    for attempt in (1, 2):
        if attempt == 1:
            load = commands(cell.invoke(), LoadInstance)[0]
        failed = cell.report(
            link, LoadFailed(instance_id=load.instance_id, error="TornModel", message="torn")
        )
        if attempt == 1:
            assert of_kind(failed, RefuseRequest) == []
            retry = only(failed, SetTimer)
            cell.now_s = retry.at_s
            load = commands(cell.tell(retry.timer), LoadInstance)[0]
    refused = only(failed, RefuseRequest)
    assert refused.reason is RefusalReason.LOAD_FAILED
    assert "torn" in refused.message
    assert refused.retry_after_s == 4.0, "the second pause"
    cell.now_s += 1.0
    at_once = only(cell.invoke(request("r2")), RefuseRequest)
    assert (at_once.reason, at_once.retry_after_s) == (RefusalReason.LOAD_FAILED, 3.0)


def test_who_comes_in_the_pause_after_a_failed_load_is_told_how_long_it_lasts() -> None:
    cell, link = one_node(deployment(slo=Slo(ttft_s=1.0)))
    (load,) = commands(cell.invoke(), LoadInstance)
    torn = LoadFailed(instance_id=load.instance_id, error="TornModel", message="torn")
    cell.report(link, torn)
    cell.now_s += 0.5
    refused = only(cell.invoke(request("r2")), RefuseRequest)
    assert (refused.reason, refused.retry_after_s) == (RefusalReason.LOAD_FAILED, 1.5)


def test_a_failed_load_is_tried_again_for_those_it_was_promised_and_then_they_are_refused() -> None:
    cell, link = one_node(deployment())
    asked = cell.invoke()
    assert only(asked, TellAccepted).grace_s == 0.0
    (load,) = commands(asked, LoadInstance)
    cell.now_s += 5.0
    assert of_kind(cell.retry(), RefuseRequest) == [], "it was promised a place"
    failed = LoadFailed(instance_id=load.instance_id, error="TornModel", message="torn")
    assert of_kind(cell.report(link, failed), RefuseRequest) == []
    cell.now_s += CellLimits().load_retry_s
    (again,) = commands(cell.tell(RetryLoadDue(name=DeploymentName("chat"))), LoadInstance)
    refused = only(cell.report(link, replace(failed, instance_id=again.instance_id)), RefuseRequest)
    assert refused.reason is RefusalReason.LOAD_FAILED
    assert "torn" in refused.message


def test_a_second_instance_goes_to_another_node_when_the_first_is_full() -> None:
    cell, _, _ = serving_cell(batch_max=1)
    cell.join(hello("n2", run_id="run-2"))
    load = commands(cell.invoke(request("r2")), LoadInstance)
    assert len(load) == 1
    assert cell.core.cell.instances[load[0].instance_id].node.node_id == "n2"


def test_shutdown_ends_every_request_with_that_reason() -> None:
    cell, _, _ = serving_cell(batch_max=1)
    cell.invoke(request("r2"))
    refused = of_kind(cell.tell(ShutdownRequested()), RefuseRequest)
    assert {r.request_id for r in refused} == {"r1", "r2"}
    assert {r.reason for r in refused} == {RefusalReason.SHUTTING_DOWN}


def answers(count: int, prompt: int = 100) -> list[Request]:
    """The requests of a call for so many answers."""
    asked = replace(request("r1", prompt=(1,) * prompt), digests=((32, (1, 2, 3)),), cache_salt="s")
    first = replace(asked, answers=count)
    others = [
        replace(asked, request_id=RequestId(f"r{n}"), first=first.request_id)
        for n in range(2, count + 1)
    ]
    return [first, *others]


def test_answers_to_one_prompt_go_where_it_is_computed_and_count_on_it() -> None:
    cell = BusyCell()
    orders = [
        command.order
        for one in answers(4)
        for command in commands(
            cell.invoke(replace(one, deployment=DeploymentName("a"))), SubmitRequest
        )
    ]
    assert [order.cached_tokens for order in orders] == [0, 96, 96, 96]
    assert {order.request.first for order in orders[1:]} == {"r1"}


@pytest.mark.parametrize("places", [3, 4])
def test_a_call_is_admitted_where_all_of_its_answers_have_a_place(places: int) -> None:
    cell = CellUnderTest(deployment("a"), profiles=(SLOW,))
    cell.join(node("n1", replace(instance("a", "a"), batch_max=places)))
    placed = [
        bool(commands(cell.invoke(replace(one, deployment=DeploymentName("a"))), SubmitRequest))
        for one in answers(4)
    ]
    assert placed == [places == 4] * 4, "none goes before the first"


def test_what_its_prompt_was_computed_for_by_another_is_asked_again_where_that_is_lost() -> None:
    cell = BusyCell()
    for one in answers(2):
        cell.invoke(replace(one, deployment=DeploymentName("a")))
    cell.tell(NodeDisconnected(link_id=cell.link, reason="it is lost"))
    _, again = cell.join(node("n2", instance("i2", "a")))
    assert [order.order.cached_tokens for order in commands(again, SubmitRequest)] == [0, 0]


@pytest.mark.parametrize(("kv_mib", "starts"), [(16, False), (24, True)])
def test_a_load_for_a_call_has_room_for_all_of_its_answers(kv_mib: int, *, starts: bool) -> None:
    """Sixteen need three blocks of 1 MiB together, and each one of its own; one alone gets 16."""
    cell = CellUnderTest(deployment("a"), profiles=(SLOW,))
    cell.join(hello(memory_bytes=(100 + kv_mib) * MIB))
    first = replace(answers(16)[0], deployment=DeploymentName("a"))
    assert bool(commands(cell.invoke(first), LoadInstance)) is starts


def test_more_answers_than_an_instance_computes_at_a_time_are_all_refused_for_that() -> None:
    cell = CellUnderTest(deployment("a"), profiles=(SLOW,))
    cell.join(replace(hello(), batch_max=3))
    for one in answers(4):
        said = cell.invoke(replace(one, deployment=DeploymentName("a")))
        refused = only(said, RefuseRequest)
        assert (refused.request_id, refused.reason) == (one.request_id, RefusalReason.MEMORY_FULL)
        assert "4 answers" in refused.message


def test_the_next_answer_has_the_whole_prompt_to_compute_where_the_first_is_gone() -> None:
    cell = BusyCell()
    for one in answers(3):
        cell.invoke(replace(one, deployment=DeploymentName("a")))
    cell.tell(CancelRequested(request_id=RequestId("r1")))
    second, third = (cell.core.cell.requests[RequestId(name)] for name in ("r2", "r3"))
    assert (second.prefill_left, third.prefill_left, third.leader) == (100, 4, second)


def test_an_answer_that_missed_the_prompt_passes_it_on_to_nobody() -> None:
    """It comes back, and is counted with the whole prompt beside the first one."""
    cell = BusyCell()
    for one in answers(3):
        cell.invoke(replace(one, deployment=DeploymentName("a")))
    shared = cell.core.cell.instances[InstanceId("a")]
    before = shared.required_blocks
    missed = PrefixMissed(request_id=RequestId("r3"), attempt=1, cached_tokens=0)
    assert commands(cell.report(cell.link, missed), SubmitRequest)
    assert shared.required_blocks == before + 3
    cell.tell(CancelRequested(request_id=RequestId("r3")))
    alone = shared.requests[RequestId("r1")].required_blocks
    assert shared.required_blocks == alone + (alone - 3)


def test_where_the_first_of_those_that_wait_for_a_load_is_gone_the_next_one_has_its_prompt() -> (
    None
):
    cell, link = one_node(deployment("a"), profiles=(SLOW,), node=hello())
    told = [cell.invoke(replace(one, deployment=DeploymentName("a"))) for one in answers(3)]
    load = only(commands(told[0], LoadInstance), LoadInstance)
    (loads,) = cell.core.cell.instances.values()
    alone = loads.expected[RequestId("r1")].required_blocks
    cell.tell(CancelRequested(request_id=RequestId("r1")))
    assert loads.expected_blocks == alone + (alone - 3)
    orders = [
        submit.order for submit in commands(cell.loaded(link, load.instance_id), SubmitRequest)
    ]
    assert [order.cached_tokens for order in orders] == [0, 96]
    assert loads.required_blocks == alone + (alone - 3)


@pytest.mark.breaks_invariants
def test_the_other_answers_come_to_the_revision_that_has_the_first() -> None:
    """A rollout has turned to the next one between the two."""
    cell = BusyCell()
    first, second = (replace(one, deployment=DeploymentName("a")) for one in answers(2))
    cell.invoke(first)
    cell.core.cell.deployments[DeploymentName("a")].advance(DeploymentState.RETIRING)
    assert commands(cell.invoke(second), SubmitRequest)


def test_the_prompt_of_several_answers_is_counted_once_whoever_of_them_goes_first() -> None:
    """Each needs four blocks, three of which are full ones of the prompt."""
    cell, call = BusyCell(), [replace(one, deployment=DeploymentName("a")) for one in answers(4)]
    for one in call:
        cell.invoke(one)
    held = cell.core.cell.instances[InstanceId("a")]
    alone = held.requests[RequestId("r1")].required_blocks
    assert held.required_blocks == alone + 3 * (alone - 3)
    for left, one in enumerate(call, start=1):
        cell.tell(CancelRequested(request_id=one.request_id))
        count = 4 - left
        assert held.required_blocks == (alone + (count - 1) * (alone - 3) if count else 0)
