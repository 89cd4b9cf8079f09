"""Answers: how one is put together and ends, when its SLO counts as met, and what is waited for."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from mesh.cli import output
from mesh.cli.answer import Answer, receive, told_late
from mesh.cli.verbs.demo import TALKS, Screen, Talk, _tell_failures
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import Scaling
from mesh.domain.errors import Cancelled, EngineError, MeshError, NotFound, Refused, Unavailable
from mesh.domain.ids import DeploymentName, NodeId, RequestId
from mesh.domain.invocation import Accepted, Finished, InvocationEvent, Tokens, Waiting
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.views import DeploymentSnapshot, InstanceSnapshot
from mesh.v1 import inference_pb2
from mesh.wire.client import MeshClient
from mesh.wire.malformed import shown
from tests.cli.views import CHAT_SMALL, LOADING, PARKED, READY

ACCEPTED = Accepted(
    request_id=RequestId("r1-7"), prompt_tokens=12, ttft_limit_s=2.0, tpot_limit_s=0.25
)
TOKENS = (
    Tokens(first_index=0, token_ids=(5,), text="Pa"),
    Tokens(first_index=1, token_ids=(6, 7), text=""),
    Tokens(first_index=3, token_ids=(8,), text="ris\n"),
)


LATE = replace(ACCEPTED, grace_s=1.5)
"""The caller is told by how much its first token will be late."""


def finished(
    *, ttft_s: float = 0.5, tpot_s: float = 0.1, reason: FinishReason = FinishReason.STOP
) -> Finished:
    return Finished(reason=reason, prompt_tokens=12, output_tokens=4, ttft_s=ttft_s, tpot_s=tpot_s)


def answered(end: Finished, accepted: Accepted = ACCEPTED) -> Answer:
    answer = Answer()
    receive((accepted, *TOKENS, end), answer)
    return answer


def test_an_answer_is_its_pieces_in_order_and_they_are_told_as_they_come() -> None:
    answer = Answer()
    pieces: list[str] = []
    phases: list[tuple[str, float]] = []
    told: list[Accepted] = []
    load = (Waiting(phase="load", share=0.0), ACCEPTED, Waiting(phase="load", share=0.5))
    receive(
        (*load, *TOKENS, finished()),
        answer,
        on_accepted=told.append,
        on_text=pieces.append,
        on_waiting=lambda phase, share: phases.append((phase, share)),
    )
    assert answer.text == "Paris\n"
    assert pieces == ["Pa", "ris\n"]
    assert phases == [("load", 0.0), ("load", 0.5)]
    assert told == [ACCEPTED]
    assert answer.token_ids == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("answer", "with_grace", "without"),
    [
        (answered(finished()), True, True),
        (answered(finished(ttft_s=2.0, tpot_s=0.25)), True, True),
        (answered(finished(ttft_s=2.1)), False, False),
        (answered(finished(ttft_s=3.0), LATE), True, False),
        (answered(finished(ttft_s=4.0), LATE), False, False),
        (answered(finished(tpot_s=0.26), LATE), False, False),
    ],
)
def test_what_was_told_to_be_late_may_be_with_its_first_token_only(
    answer: Answer, with_grace: bool, without: bool
) -> None:
    assert answer.slo_met(with_grace=True) is with_grace
    assert answer.slo_met(with_grace=False) is without
    assert answer.plain()["slo_met"] is with_grace
    assert answer.plain()["slo_met_without_grace"] is without


def test_scripts_learn_which_node_computed_the_answer() -> None:
    assert answered(replace(finished(), node_id=NodeId("cpu0"))).plain()["node_id"] == "cpu0"
    assert answered(finished()).plain()["node_id"] is None


def test_an_end_that_only_the_controller_knows_is_told_in_its_word() -> None:
    reason = shown(FinishReason, "bored", inference_pb2.Finished(), "reason")
    answer = answered(finished(reason=reason))
    assert answer.plain()["finish_reason"] == "bored"
    assert "4 output tokens, bored?;" in answer.stats()


def test_the_stats_line_compares_both_numbers_with_their_limits() -> None:
    assert answered(finished(ttft_s=3.0, tpot_s=0.3), LATE).stats() == (
        "r1-7: 12 prompt and 4 output tokens, stop; "
        "TTFT 3.000 s (SLO 2, told late by 1.50: met); TPOT 0.3000 s (SLO 0.25: missed)"
    )


def test_who_will_be_late_is_told_so_before_the_first_token() -> None:
    assert told_late(ACCEPTED) == ""
    assert told_late(replace(LATE, grace_s=1.234)) == (
        "an instance has to be loaded: the first token comes about 1.23 s after its limit, 2 s"
    )


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((ACCEPTED, *TOKENS), EngineError),
        ((ACCEPTED, *TOKENS, finished(reason=FinishReason.FAILED)), EngineError),
        ((ACCEPTED, *TOKENS, finished(reason=FinishReason.CANCELLED)), Cancelled),
    ],
)
def test_an_answer_that_does_not_end_well_is_an_error_and_keeps_what_had_come(
    events: tuple[InvocationEvent, ...], error: type[Exception]
) -> None:
    answer = Answer()
    with pytest.raises(error):
        receive(events, answer)
    assert answer.text == "Paris\n"


def talk(number: int, answer: Answer, failure: EngineError | None = None) -> Talk:
    return Talk(
        deployment=DeploymentName(f"chat-{number}"),
        prompt=f"Question {number}?",
        answer=answer,
        failure=failure,
    )


def test_the_demo_shows_each_answer_once_it_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    growing = Answer(accepted=ACCEPTED, pieces=["one\n"])
    broken = talk(3, Answer(pieces=["half"]), EngineError("out of order"))
    with Screen([talk(1, growing), talk(2, answered(finished())), broken]) as screen:
        screen.refresh()
        assert capsys.readouterr().out == (
            "chat-2  Question 2?\n  Paris\n"
            "chat-3  Question 3?\n  half [EngineError: out of order]\n"
        )
        growing.pieces.append("two")
        screen.refresh()
        assert capsys.readouterr().out == ""
        growing.finished = finished()
        screen.refresh()
    assert capsys.readouterr().out == "chat-1  Question 1?\n  one\n  two\n"


def test_the_demos_table_says_no_for_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    talks = [
        talk(1, answered(finished(ttft_s=3.0), LATE)),
        talk(2, Answer(accepted=ACCEPTED), EngineError("x")),
    ]
    output.table(TALKS, talks)
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == [
        *("chat-1", "Question", "1?", "4", "3.000", "2", "0.1000", "0.25", "1.50"),
        *("yes", "no"),
    ]
    assert second.split() == ["chat-2", "Question", "2?", "0", *("-" * 5), "no", "no"]


def failed_talk(failure: MeshError | None) -> Talk:
    made = Talk(deployment=DeploymentName("chat"), prompt="hi")
    made.failure = failure
    return made


REFUSED = Refused("late", reason=RefusalReason.FIRST_TOKEN_LATE)


def test_a_demo_of_which_some_are_refused_or_late_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _tell_failures([failed_talk(None), failed_talk(REFUSED)])
    assert "this machine is busy: 1 of 2 prompts were refused" in capsys.readouterr().err
    full = Refused("full", reason=RefusalReason.MEMORY_FULL)
    _tell_failures([failed_talk(None), failed_talk(full)])
    said = capsys.readouterr().err
    assert "this machine has little memory: 1 of 2 prompts were refused" in said
    assert "busy" not in said
    in_time, late = (talk(1, answered(finished(ttft_s=ttft_s), LATE)) for ttft_s in (3.0, 4.0))
    _tell_failures([late, in_time])
    assert "1 of 2 answers came later than was foreseen" in capsys.readouterr().err
    _tell_failures([failed_talk(None), in_time])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("failures", [[REFUSED, REFUSED], [None, Unavailable("gone")]])
def test_a_demo_without_answers_or_that_breaks_fails(failures: list[MeshError | None]) -> None:
    with pytest.raises(MeshError, match="of 2 answers did not complete"):
        _tell_failures([failed_talk(failure) for failure in failures])


NAME = CHAT_SMALL.spec.name


def client(*found: DeploymentSnapshot | NotFound) -> Mock:
    """A controller that says this of the deployment, one after the other, and then goes on so."""
    mock = Mock(spec=MeshClient)
    mock.get.side_effect = [*found, *[found[-1]] * 10]
    return mock


def having(*instances: InstanceSnapshot, replicas_min: int = 1) -> DeploymentSnapshot:
    spec = replace(CHAT_SMALL.spec, scaling=Scaling(replicas_min=replicas_min))
    return replace(CHAT_SMALL, spec=spec, instances=instances)


@pytest.mark.parametrize("goal", [Goal.READY, Goal.LOADED])
def test_a_parked_instance_is_not_waited_for(goal: Goal) -> None:
    """What an unchanged deployment has may be parked, and stays so until a request comes."""
    wait_for(client(having(PARKED)), NAME, goal, 0.0)


@pytest.mark.parametrize("goal", [Goal.READY, Goal.LOADED])
def test_one_that_loads_is_waited_for(goal: Goal) -> None:
    wait_for(client(having(LOADING), having(READY)), NAME, goal, 5.0)
    with pytest.raises(Cancelled, match=f"not {goal} after 0 s: 0 of 1 instances"):
        wait_for(client(having(LOADING)), NAME, goal, 0.0)


def test_at_zero_a_deployment_is_ready_but_not_loaded() -> None:
    at_zero = having(replicas_min=0)
    wait_for(client(at_zero), NAME, Goal.READY, 0.0)
    with pytest.raises(Cancelled, match="0 of 1"):
        wait_for(client(at_zero), NAME, Goal.LOADED, 0.0)


def test_what_is_being_imported_is_not_ready() -> None:
    imported = replace(having(replicas_min=0), model=None, phase="download m.gguf")
    with pytest.raises(Cancelled, match=r"instances ready: download m\.gguf"):
        wait_for(client(imported), NAME, Goal.READY, 0.0)


def test_only_who_waits_for_its_end_may_wait_for_what_is_unknown() -> None:
    wait_for(client(having(READY), NotFound("it is gone")), NAME, Goal.GONE, 5.0)
    with pytest.raises(NotFound):
        wait_for(client(NotFound("no such deployment")), NAME, Goal.READY, 5.0)
    with pytest.raises(Cancelled, match="not gone"):
        wait_for(client(having(READY)), NAME, Goal.GONE, 0.0)
