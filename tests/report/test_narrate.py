"""Decisions in words."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.domain.actions import CloseLink, RefuseRequest, SendCommand, StoreRevisions, TellAccepted
from mesh.domain.events import (
    InvokeRequested,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    ProfileRequested,
)
from mesh.domain.ids import DeploymentName, InstanceId, NodeId, OperationId, RequestId
from mesh.domain.messages import (
    InstanceGone,
    LoadInstance,
    NodeCommand,
    NodeReport,
    ProfileDone,
    ProfileFailed,
    ProfileInstance,
    ProfileProgress,
    ProfileRefined,
    SubmitRequest,
    UseProfile,
)
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import ATTEMPTS_EACH, RequestOrder
from mesh.domain.revision import Revision, RevisionState
from mesh.domain.slo import Slo
from mesh.domain.views import CellLine
from mesh.report.narrate import Narrator
from tests.core.cells import CellUnderTest, commands, deployment, hello, one_node, request
from tests.support.profiles import PROFILE, profile

OPERATION = OperationId("o1")
INSTANCE = InstanceId("chat-1-1")


def narrate(event: object, actions: Sequence[object]) -> list[CellLine]:
    """What one decision says by itself."""
    return Narrator()(event, actions)


def test_a_request_that_scales_from_zero_tells_its_story() -> None:
    cell = CellUnderTest(deployment())
    connected = NodeConnected(link_id=1, hello=hello())
    lines = narrate(connected, cell.tell(connected))
    assert [(line.kind, line.subject) for line in lines] == [("node", "n1")]
    asked = InvokeRequested(request=request())
    actions = cell.tell(asked)
    lines = narrate(asked, actions)
    (load,) = commands(actions, LoadInstance)
    assert [(line.kind, line.text) for line in lines] == [
        ("instance", f"load chat with {load.kv_blocks} KV blocks")
    ]
    link_loaded = cell.loaded(1, load.instance_id)
    assert "to chat-1-1, 3 prompt tokens" in [line.text for line in narrate(None, link_loaded)]


def test_a_node_that_is_lost_or_refused_is_named() -> None:
    narrator, closed = Narrator(), CloseLink(link_id=1, error="", message="old")
    lost = NodeDisconnected(link_id=1, reason="silent")
    narrator(NodeConnected(link_id=1, hello=hello()), [])
    lines = [*narrator(None, [closed]), *narrator(lost, []), *narrator(lost, [])]
    assert [(line.subject, line.text) for line in lines] == [
        ("n1", "closed: old"),
        ("n1", "disconnected: silent"),
        ("link 1", "disconnected: silent"),
    ]


@pytest.mark.parametrize(("tries", "told"), [(1, ""), (2, ", attempt 2")])
def test_attempts_of_a_request_with_a_key_are_counted_from_one(tries: int, told: str) -> None:
    order = RequestOrder(
        request=request(), attempt=2 * ATTEMPTS_EACH + tries, slo=Slo(), age_s=0.0, due_in_s=1.0
    )
    sent = SendCommand(link_id=1, command=SubmitRequest(instance_id=INSTANCE, order=order))
    (line,) = narrate(None, [sent])
    assert line.text == f"to chat-1-1, 3 prompt tokens{told}"


def test_a_refusal_names_its_reason() -> None:
    cell = CellUnderTest(deployment())
    (line,) = narrate(None, cell.invoke())
    assert line.text.startswith("refused (no_node): ")


def test_only_who_will_be_late_is_told_of() -> None:
    late = TellAccepted(request_id=RequestId("r1"), grace_s=1.234)
    (line,) = narrate(None, [late, TellAccepted(request_id=RequestId("r2"), grace_s=0.0)])
    assert (line.subject, line.text) == (
        "r1",
        "told that its first token will be 1.23 s late, for a load",
    )


@pytest.mark.parametrize(
    "reason",
    [
        RefusalReason.FIRST_TOKEN_LATE,
        RefusalReason.DELAYS_RUNNING,
        RefusalReason.TPOT_EXCEEDED,
    ],
)
def test_a_refusal_for_want_of_time_names_its_reason(reason: RefusalReason) -> None:
    refusal = RefuseRequest(request_id=RequestId("r1"), reason=reason, message="2 s, limit 1 s")
    told = CellLine(kind="request", subject="r1", text=f"refused ({reason}): 2 s, limit 1 s")
    assert narrate(None, [refusal]) == [told]


@pytest.mark.parametrize(
    ("node_id", "text"), [(None, "measure a profile"), (NodeId("n1"), "measure a profile on n1")]
)
def test_a_wish_for_a_profile_names_the_deployment(node_id: NodeId | None, text: str) -> None:
    asked = ProfileRequested(operation_id=OPERATION, name=DeploymentName("chat"), node_id=node_id)
    assert narrate(asked, []) == [CellLine(kind="deployment", subject="chat", text=text)]


@pytest.mark.parametrize(
    ("report", "lines"),
    [
        (ProfileProgress(operation_id=OPERATION, phase="decode", share=0.5), []),
        (
            ProfileDone(operation_id=OPERATION, profile=PROFILE),
            ["measured model sha256-0123456789abcdef in 2 s, on test"],
        ),
        (
            ProfileFailed(operation_id=OPERATION, error="EngineError", message="too hot"),
            ["measuring failed: too hot"],
        ),
    ],
)
def test_how_a_measurement_ended_is_told(report: NodeReport, lines: list[str]) -> None:
    """Its progress is for the one who asked."""
    said = narrate(NodeReported(link_id=1, report=report), [])
    assert [(line.subject, line.text) for line in said] == [(OPERATION, text) for text in lines]


def test_a_refined_profile_is_told_of_its_instance() -> None:
    refined = ProfileRefined(instance_id=INSTANCE, profile=PROFILE)
    (line,) = narrate(NodeReported(link_id=1, report=refined), [])
    assert (line.subject, line.kind) == (INSTANCE, "instance")
    assert line.text == "iterations refined the profile of model sha256-0123456789abcdef"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            ProfileInstance(operation_id=OPERATION, instance_id=INSTANCE),
            "measure iteration times",
        ),
        (UseProfile(instance_id=INSTANCE, profile=PROFILE), "new profile: measured"),
        (
            UseProfile(instance_id=INSTANCE, profile=profile(scaled_from="another")),
            "new profile: another",
        ),
    ],
)
def test_what_profiles_mean_to_an_instance_is_told(command: NodeCommand, text: str) -> None:
    told = CellLine(kind="instance", subject=INSTANCE, text=text)
    assert narrate(None, [SendCommand(link_id=1, command=command)]) == [told]


def test_token_traffic_is_left_out() -> None:
    cell, link = one_node(deployment())
    cell.loaded(link, commands(cell.invoke(), LoadInstance)[0].instance_id)
    assert narrate(None, cell.tokens(link, "r1", [1, 2])) == []


@pytest.mark.parametrize(
    ("serves", "newest", "text"),
    [
        (2, RevisionState.PAST, "revision 2 serves from now on"),
        (1, RevisionState.FAILED, "revision 2 failed: torn"),
    ],
)
def test_what_became_of_a_revision_is_told(serves: int, newest: RevisionState, text: str) -> None:
    made = deployment("chat@2" if serves == 2 else "chat")
    other = Revision(deployment=replace(made, revision=3 - serves), state=newest, message="torn")
    action = StoreRevisions(deployment=replace(made, revision=serves), revisions=(other,))
    (told,) = narrate(None, [action])
    assert (told.subject, told.text, told.fault) == ("chat", text, "failed" in text)
    assert told.deployment == "chat"


def test_a_refusal_in_whatever_words_and_an_end_that_was_asked_for_are_no_faults() -> None:
    refused = RefuseRequest(
        request_id=RequestId("r1"),
        reason=RefusalReason.LOAD_FAILED,
        message="the load failed: the link was closed: it is gone: disconnected",
    )
    gone = NodeReported(link_id=1, report=InstanceGone(instance_id=INSTANCE))
    died = replace(gone, report=InstanceGone(instance_id=INSTANCE, message="killed"))
    lines = [*narrate(gone, [refused]), *narrate(died, [])]
    assert [line.fault for line in lines] == [False, False, True]
