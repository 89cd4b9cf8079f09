"""Requests that a node brings along: into the books, to their clients, or to their end."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.core.controller.state.cell import EPOCHS_MAX
from mesh.domain.actions import (
    AcceptLink,
    ControllerAction,
    DeliverTokens,
    RefuseRequest,
    TellAccepted,
)
from mesh.domain.events import (
    CancelRequested,
    DrainRequested,
    InvokeRequested,
    LeaseCheckDue,
    NodeDisconnected,
    ShutdownRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, OperationId, RequestId
from mesh.domain.limits import ORPHANS_MAX, CellLimits
from mesh.domain.messages import (
    AbortRequest,
    HeldRequest,
    NodeHello,
    ResizeKv,
    SubmitRequest,
    UnloadInstance,
)
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.request import ATTEMPTS_EACH, Request, RequestOrder, RequestTokens, Resumed
from mesh.domain.slo import Slo
from tests.core.cells import (
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    one_node,
    only,
    request,
)

KEPT = RequestId("kept")
ON = InstanceId("chat-0-1")
FIRST = ATTEMPTS_EACH + 1
"""The first attempt under the epoch of these cells, which is 1."""


def asked() -> Request:
    return replace(request("kept"), keyed=True)


GONE = replace(asked(), deployment=DeploymentName("gone"))


def held(
    *, before: int = 1, kept: int = 2, attempt: int = 2, finish: FinishReason | None = None
) -> HeldRequest:
    order = RequestOrder(
        request=asked(),
        attempt=attempt,
        output_tokens=tuple(range(before)),
        slo=Slo(),
        age_s=4.0,
        due_in_s=0.2,
    )
    outputs = tuple(
        RequestTokens(
            request_id=KEPT,
            attempt=attempt,
            first_index=index,
            token_ids=(index,),
            finish=finish if index == before + kept - 1 else None,
        )
        for index in range(before, before + kept)
    )
    return HeldRequest(instance_id=ON, order=order, outputs=outputs)


def hello_with(*requests: HeldRequest) -> NodeHello:
    return replace(
        hello(), instances=(instance_report(instance_id=ON, kv_blocks=64),), requests=requests
    )


def adopted(actions: Sequence[ControllerAction]) -> list[tuple[str, int, int]]:
    rule = only(actions, AcceptLink).rule
    return [(one.request_id, one.attempt, one.next_index) for one in rule.adopted]


def delivered(actions: Sequence[ControllerAction]) -> list[int]:
    """The indices of the tokens; for an end without one, where it is."""
    return [
        action.outputs.first_index + index
        for action in of_kind(actions, DeliverTokens)
        for index in range(len(action.outputs.token_ids) or 1)
    ]


def come(cell: CellUnderTest, count: int) -> list[ControllerAction]:
    """The client asks again, and has so many tokens."""
    resumed = Resumed(output_tokens=tuple(range(count)), age_s=3.0, accepted=True)
    return cell.tell(InvokeRequested(request=asked(), resumed=resumed))


def test_what_a_node_brings_along_is_kept_for_its_client_and_goes_on() -> None:
    cell = CellUnderTest(deployment())
    link, joined = cell.join(hello_with(held()))
    assert adopted(joined) == [("kept", 2, 3)]
    entry = cell.core.cell.requests[KEPT]
    assert (entry.instance is not None, entry.arrival_s, entry.due_s) == (True, 96.0, 100.2)
    assert not delivered(cell.tokens(link, "kept", [3], first=3, attempt=2)), "nobody is there"
    came = come(cell, 2)
    assert (len(of_kind(came, TellAccepted)), delivered(came)) == (1, [2, 3])
    assert not commands(came, SubmitRequest)
    assert not commands(came, AbortRequest)
    ended = cell.tokens(link, "kept", [4], first=4, attempt=2, finish=FinishReason.STOP)
    assert delivered(ended) == [4]
    assert not cell.core.cell.requests


@pytest.mark.parametrize("count", [0, 4])
def test_a_client_that_is_elsewhere_goes_on_from_there_anew(count: int) -> None:
    """It lacks a token that the node does not tell any more, or has one of a later attempt."""
    cell = CellUnderTest(deployment())
    cell.join(hello_with(held()))
    came = come(cell, count)
    assert only(commands(came, AbortRequest), AbortRequest).attempt == 2
    assert only(commands(came, SubmitRequest), SubmitRequest).order.output_tokens == tuple(
        range(count)
    )
    assert not cell.core.cell.orphans


def test_a_client_that_comes_before_its_node_waits_for_it() -> None:
    cell = CellUnderTest(deployment())
    came = come(cell, 1)
    assert only(came, TellAccepted).request_id == KEPT, "though there is no node"
    _, joined = cell.join(hello_with(held()))
    assert (adopted(joined), delivered(joined)) == ([("kept", 2, 3)], [1, 2])
    assert not commands(joined, SubmitRequest)


def test_one_that_has_ended_on_its_node_is_told_whenever_its_client_comes() -> None:
    for count, before in ((2, True), (2, False), (3, True), (3, False)):
        cell = CellUnderTest(deployment())
        first = come(cell, count) if before else []
        _, joined = cell.join(hello_with(held(finish=FinishReason.STOP)))
        told = joined if before else come(cell, count)
        assert delivered(told) == [count], (count, before)
        assert only(told, DeliverTokens).outputs.finish is FinishReason.STOP
        assert adopted(joined) == []
        assert not cell.core.cell.requests
        assert not delivered(first)


def test_one_that_nobody_comes_for_is_cancelled() -> None:
    cell = CellUnderTest(deployment(), limits=CellLimits(adopted_s_max=2.0))
    cell.join(hello_with(held()))
    cell.now_s += 1.9
    assert not commands(cell.tell(LeaseCheckDue()), AbortRequest)
    cell.now_s += 0.2
    assert only(commands(cell.tell(LeaseCheckDue()), AbortRequest), AbortRequest).attempt == 2
    assert not cell.core.cell.orphans
    assert not cell.core.cell.requests


@pytest.mark.parametrize(
    "wrong",
    [
        replace(held(), instance_id=InstanceId("another")),
        held(attempt=0),
        replace(held(), outputs=held().outputs[1:]),
        replace(held(), outputs=held(attempt=3).outputs),
        replace(held(), outputs=tuple(replace(o, request_id="another") for o in held().outputs)),  # type: ignore[arg-type]
        held(kept=8),
        replace(held(), order=replace(held().order, age_s=float("nan"))),
        replace(held(), order=replace(held().order, due_in_s=float("inf"))),
        replace(held(), outputs=held(finish=FinishReason.STOP).outputs[::-1]),
        replace(held(), order=replace(held().order, request=request("kept"))),
        replace(
            held(),
            order=replace(
                held().order, request=replace(asked(), deployment=DeploymentName("gone"))
            ),
        ),
    ],
)
def test_what_cannot_be_taken_over_whole_is_not(wrong: HeldRequest) -> None:
    cell = CellUnderTest(deployment())
    _, joined = cell.join(hello_with(wrong))
    assert adopted(joined) == []
    assert not cell.core.cell.requests
    assert not cell.core.cell.orphans


def test_of_a_request_on_two_nodes_one_goes_on() -> None:
    cell = CellUnderTest(deployment())
    cell.join(hello_with(held()))
    second = replace(hello_with(held(attempt=1)), node_id="n2", run_id="run-2")  # type: ignore[arg-type]
    second = replace(
        second, instances=(instance_report(instance_id=InstanceId("chat-0-2"), kv_blocks=64),)
    )
    assert adopted(cell.join(second)[1]) == []


def test_a_link_that_breaks_costs_nothing_where_its_node_comes_back() -> None:
    cell, link = one_node(deployment(), node=hello_with())
    cell.tell(InvokeRequested(request=asked()))
    cell.tokens(link, "kept", [0], first=0, attempt=FIRST)
    cell.tell(NodeDisconnected(link_id=link, reason="broken"))
    link, joined = cell.join(hello_with(held(before=0, kept=2, attempt=FIRST)))
    assert (adopted(joined), delivered(joined)) == ([("kept", FIRST, 2)], [1])
    entry = cell.core.cell.requests[KEPT]
    assert (entry.attempt, entry.failures) == (FIRST, 1)
    assert delivered(cell.tokens(link, "kept", [2], first=2, attempt=FIRST)) == [2]


def test_a_controller_that_ends_leaves_it_to_its_node() -> None:
    cell, link = one_node(deployment(), node=hello_with())
    cell.tell(InvokeRequested(request=asked()))
    cell.tell(InvokeRequested(request=request("other")))
    cell.tokens(link, "kept", [0], first=0, attempt=FIRST)
    ended = cell.tell(ShutdownRequested())
    assert [one.request_id for one in commands(ended, AbortRequest)] == ["other"]


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    "other",
    [
        replace(asked(), deployment=DeploymentName("other")),
        replace(asked(), asked_digest="of another prompt of this length"),
    ],
)
def test_another_call_under_the_key_gets_nothing_of_the_first(other: Request, before: int) -> None:
    """Whether it comes before the node that has the first or after it."""
    cell = CellUnderTest(deployment(), deployment("other"))
    again = InvokeRequested(request=other, resumed=Resumed(accepted=True))
    told = list(cell.tell(again)) if before else []
    joined = cell.join(hello_with(held(before=0)))[1]
    told += joined if before else cell.tell(again)
    assert not delivered(told)
    assert (adopted(joined) == []) is bool(before)
    assert cell.core.cell.requests[KEPT].original.asked_digest == other.asked_digest
    assert not cell.core.cell.orphans


def test_a_key_that_is_called_again_at_another_revision_gets_its_own_tokens() -> None:
    """The node has it of the revision that retires, and its client was queued at the one after."""
    cell = CellUnderTest(deployment())
    cell.tell(InvokeRequested(request=asked(), resumed=Resumed(accepted=True)))
    known = cell.core.cell.requests[KEPT]
    known.original = replace(asked(), deployment=DeploymentName("chat@2"))
    assert adopted(cell.join(hello_with(held(before=0)))[1]) == []


def test_no_attempt_has_a_number_twice_under_one_key() -> None:
    """A broken stream whose client comes again, a cancel, and a key that is called anew."""
    cell, link = one_node(deployment(), node=hello_with())
    numbers = []
    for _ in range(3):
        sent = cell.tell(InvokeRequested(request=asked()))
        numbers.append(only(commands(sent, SubmitRequest), SubmitRequest).order.attempt)
        cell.tell(CancelRequested(request_id=KEPT))
    again = cell.tell(InvokeRequested(request=asked()))
    again = cell.tell(InvokeRequested(request=asked(), resumed=Resumed(accepted=True)))
    numbers.append(only(commands(again, SubmitRequest), SubmitRequest).order.attempt)
    assert numbers == [FIRST, FIRST + 1, FIRST + 2, FIRST + 4]
    assert not delivered(cell.tokens(link, "kept", [0], first=0, attempt=FIRST + 3))


def test_what_was_refused_of_a_node_has_a_lower_number_than_what_is_placed_there() -> None:
    cell = CellUnderTest(deployment())
    cell.join(hello_with(replace(held(attempt=7), outputs=held(attempt=7).outputs[1:])))
    sent = cell.tell(InvokeRequested(request=asked()))
    assert only(commands(sent, SubmitRequest), SubmitRequest).order.attempt == FIRST


def test_what_has_ended_comes_back_no_more() -> None:
    """The node was cut off, the request went on elsewhere; or its end was told, but the welcome was
    lost.
    """
    cell, link = one_node(deployment(), node=hello_with())
    cell.tell(InvokeRequested(request=asked()))
    cell.tell(NodeDisconnected(link_id=link, reason="cut off"))
    cell.tell(CancelRequested(request_id=KEPT))
    for attempt in (
        FIRST,
        EPOCHS_MAX * ATTEMPTS_EACH - 1,
    ):  # of an earlier leader: numbers go round
        link, joined = cell.join(hello_with(held(before=0, attempt=attempt)))
        assert (adopted(joined), cell.core.cell.orphans) == ([], {})
        cell.tell(NodeDisconnected(link_id=link, reason="cut off"))
    cell = CellUnderTest(deployment())
    ended = hello_with(held(finish=FinishReason.STOP))
    link, _ = cell.join(ended)
    assert cell.core.cell.served == 0, "nobody has come for it"
    assert delivered(come(cell, 2)) == [2]
    cell.tell(NodeDisconnected(link_id=link, reason="the welcome was lost"))
    cell.join(ended)
    assert (cell.core.cell.served, cell.core.cell.orphans) == (1, {})


def test_a_long_backlog_is_one_message() -> None:
    cell, link = one_node(deployment(), node=hello_with(held(before=0, kept=2)))
    for index in range(2, 5):
        cell.tokens(link, "kept", [index], first=index, attempt=2)
    told = only(come(cell, 1), DeliverTokens).outputs
    assert (told.first_index, told.token_ids) == (1, (1, 2, 3, 4))


def test_what_runs_on_a_draining_node_goes_on_after_its_link_broke() -> None:
    cell = CellUnderTest(deployment())
    cell.join(hello_with())
    cell.tell(InvokeRequested(request=asked()))
    cell.tell(DrainRequested(operation_id=OperationId("drain"), node_id=hello().node_id))
    again = cell.join(hello_with(held(before=0, attempt=FIRST)))[1]
    assert adopted(again) == [("kept", FIRST, 2)]
    assert not commands(again, UnloadInstance)


def test_a_controller_that_ends_leaves_nodes_the_memory_of_what_goes_on() -> None:
    """Nothing is unloaded on a draining node, and no KV cache shrinks."""
    cell = CellUnderTest(deployment())
    cell.join(hello_with())
    cell.tell(InvokeRequested(request=asked()))
    cell.tell(DrainRequested(operation_id=OperationId("drain"), node_id=hello().node_id))
    stopped = cell.tell(ShutdownRequested())
    assert not commands(stopped, UnloadInstance)
    assert not commands(stopped, ResizeKv)
    assert only(stopped, RefuseRequest).reason is RefusalReason.SHUTTING_DOWN


def test_what_waits_for_clients_is_bounded() -> None:
    cell = CellUnderTest(deployment())
    ended = held(finish=FinishReason.STOP)

    def named(number: int) -> HeldRequest:
        name = RequestId(f"k-{number}")
        order = replace(ended.order, request=replace(asked(), request_id=name))
        outputs = tuple(replace(one, request_id=name) for one in ended.outputs)
        return replace(ended, order=order, outputs=outputs)

    cell.join(hello_with(*(named(number) for number in range(ORPHANS_MAX + 3))))
    assert len(cell.core.cell.orphans) == ORPHANS_MAX


def test_an_id_of_the_controllers_own_that_a_node_took_is_its_next_calls() -> None:
    cell = CellUnderTest(deployment())
    cell.join(hello_with(held()))
    sent = cell.tell(InvokeRequested(request=request("kept")))
    assert only(commands(sent, SubmitRequest), SubmitRequest).order.attempt == 1
    assert not cell.core.cell.orphans
