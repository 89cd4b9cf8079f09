"""Requests that a node brings along: into the books, to their clients, or to their end."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.domain.actions import AcceptLink, ControllerAction, DeliverTokens, TellAccepted
from mesh.domain.events import InvokeRequested, LeaseCheckDue, NodeDisconnected, ShutdownRequested
from mesh.domain.ids import DeploymentName, InstanceId, RequestId
from mesh.domain.limits import CellLimits
from mesh.domain.messages import AbortRequest, HeldRequest, NodeHello, SubmitRequest
from mesh.domain.reasons import FinishReason
from mesh.domain.request import Request, RequestOrder, RequestTokens, Resumed
from mesh.domain.slo import Slo
from tests.core.cells import (
    CellUnderTest,
    commands,
    deployment,
    hello,
    instance_report,
    of_kind,
    only,
    request,
)

KEPT = RequestId("kept")
ON = InstanceId("chat-0-1")


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
    return [action.outputs.first_index for action in of_kind(actions, DeliverTokens)]


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
    cell = CellUnderTest(deployment())
    link, _ = cell.join(hello_with())
    cell.tell(InvokeRequested(request=asked()))
    cell.tokens(link, "kept", [0], first=0)
    cell.tell(NodeDisconnected(link_id=link, reason="broken"))
    link, joined = cell.join(hello_with(held(before=0, kept=2, attempt=1)))
    assert (adopted(joined), delivered(joined)) == ([("kept", 1, 2)], [1])
    entry = cell.core.cell.requests[KEPT]
    assert (entry.attempt, entry.failures) == (1, 1)
    assert delivered(cell.tokens(link, "kept", [2], first=2)) == [2]


def test_a_controller_that_ends_leaves_it_to_its_node() -> None:
    cell = CellUnderTest(deployment())
    link, _ = cell.join(hello_with())
    cell.tell(InvokeRequested(request=asked()))
    cell.tell(InvokeRequested(request=request("other")))
    cell.tokens(link, "kept", [0], first=0)
    ended = cell.tell(ShutdownRequested())
    assert [one.request_id for one in commands(ended, AbortRequest)] == ["other"]
