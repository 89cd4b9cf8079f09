"""Differences between actions: paths to what differs, in few words."""

from dataclasses import replace

from mesh.domain.actions import RefuseRequest, SendCommand
from mesh.domain.ids import InstanceId, RequestId
from mesh.domain.messages import ResizeKv
from mesh.domain.reasons import RefusalReason
from mesh.evaluation.replaying import DIFFERENCES_MAX, TEXT_MAX, Difference, differences, shown

EIGHT = ResizeKv(instance_id=InstanceId("i-1"), kv_blocks=8)
GROW = SendCommand(link_id=1, command=EIGHT)
REFUSAL = RefuseRequest(
    request_id=RequestId("r-1"), reason=RefusalReason.MEMORY_FULL, message="no room"
)


def test_equal_actions_do_not_differ() -> None:
    assert differences((GROW, REFUSAL), (GROW, REFUSAL)) == ()


def test_only_the_fields_that_differ_are_named() -> None:
    other = replace(GROW, link_id=2, command=replace(EIGHT, kv_blocks=9))
    assert differences((REFUSAL, GROW), (REFUSAL, other)) == (
        Difference(where="SendCommand[1].link_id", recorded="1", decided="2"),
        Difference(where="SendCommand[1].command.kv_blocks", recorded="8", decided="9"),
    )


def test_another_kind_of_action_is_shown_as_a_whole() -> None:
    (found,) = differences((GROW,), (REFUSAL,))
    assert found.where == "SendCommand[0]"
    assert found.recorded == (
        "SendCommand(link_id=1, command=ResizeKv(instance_id='i-1', kv_blocks=8))"
    )
    assert "reason=memory_full" in found.decided


def test_a_missing_action_is_nothing() -> None:
    (less,) = differences((GROW, REFUSAL), (GROW,))
    assert (less.where, less.decided) == ("RefuseRequest[1]", "nothing")
    (more,) = differences((), (REFUSAL,))
    assert (more.where, more.recorded) == ("RefuseRequest[0]", "nothing")


def test_what_is_long_is_cut() -> None:
    assert shown(tuple(range(600))) == "(0, 1, 2, 3, 4, 5, … 600 in all)"
    assert shown({n: n for n in range(7)}).endswith("5: 5, … 7 in all}")
    assert len(shown("x" * 1000)) == TEXT_MAX
    others = tuple(replace(GROW, link_id=n) for n in range(2, 100))
    assert len(differences((GROW,) * 98, others)) == DIFFERENCES_MAX
