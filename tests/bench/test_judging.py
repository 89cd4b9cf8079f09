"""Which calls count as admitted, as in time, and as ended once; and what that says of all."""

from dataclasses import replace

import pytest

from bench.judging import Judged, Judgement, judge, judged
from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.slo import Slo
from mesh.evaluation.load_client import Answer, Call

CALL = Call(
    at_s=0.0,
    deployment=DeploymentName("chat"),
    slo=Slo(ttft_s=1.0, tpot_s=0.1),
    prompt_tokens=(7,) * 100,
    output_tokens=3,
)
"""Its first token is due after 1 s, each further one 0.1 s later."""
WHOLE = Answer(ended_s=2.0, tokens_s=(0.1, 0.2, 0.3), finishes=1)


def call(
    *tokens_s: float,
    ended_s: float = 5.0,
    refused: str = "",
    failed: str = "",
    node: str = "",
    accepted: bool = False,
    grace_s: float = 0.0,
) -> Judged:
    answer = Answer(
        ended_s=ended_s,
        tokens_s=tokens_s,
        refused=refused,
        failed=failed,
        finishes=0 if refused or failed else 1,
        request_id=RequestId("r1") if accepted else None,
        grace_s=grace_s,
        node_id=node,
    )
    return judged(CALL, answer)


def test_a_call_meets_its_slo_when_each_token_comes_by_its_own_deadline() -> None:
    assert call(1.0, 1.1, 1.2).outcome.met
    assert call(0.2, 1.1, 1.15).outcome.met, "early tokens do not move the deadlines of later ones"
    assert not call(1.01, 1.02, 1.03).outcome.met
    assert not call(0.1, 0.2, 1.25).outcome.met


def test_a_call_that_lacks_tokens_does_not_meet_its_slo() -> None:
    assert not call(0.1, 0.2).outcome.met
    assert not call(failed="unavailable").outcome.met


def test_a_call_may_be_as_late_as_it_was_told() -> None:
    assert not call(2.0, 2.1, 2.2).outcome.met
    assert call(2.0, 2.1, 2.2, grace_s=1.5).outcome.met


def test_each_token_has_a_deadline_of_its_own_later_by_what_was_told() -> None:
    assert call(1.0, 1.1, 1.2).met_tokens == 3
    assert call(1.05, 1.06, 1.07).met_tokens == 2
    assert call(1.55, 1.56, 1.57, grace_s=0.6).met_tokens == 3
    assert call(0.9, 0.95, 1.0).spares_s == pytest.approx((0.1, 0.15, 0.2))


def test_lateness_is_that_of_the_latest_token() -> None:
    assert call(1.5, 1.6, 1.3).late_s == pytest.approx(0.5)


def test_tokens_that_never_came_are_late() -> None:
    torn = call(0.1, 0.2)
    made = Judgement((torn, call(0.1, 0.2, 0.3)))
    assert made.met_tokens_share == pytest.approx(5 / 6)
    assert made.torn == (torn,)


def test_a_refused_call_is_not_admitted_and_not_late() -> None:
    made = Judgement(
        (
            call(0.1, 0.2, 0.3),
            call(refused="first_token_late", ended_s=0.9),
            call(refused="delays_running", ended_s=1.1),
            call(2.0, 2.1, 2.2),
        )
    )
    assert (made.requests, len(made.admitted), len(made.refused), made.met) == (4, 2, 2, 1)
    assert made.refused_by_reason == {"delays_running": 1, "first_token_late": 1}
    assert list(made.late_s) == pytest.approx([1.0])
    assert not made.torn
    assert made.met_tokens_share == 0.5


def test_late_with_the_first_token_is_told_from_late_with_a_later_one() -> None:
    made = Judgement((call(1.1, 1.15, 1.16), call(0.5, 1.2, 1.2), call()))
    assert made.late_first == 1
    assert len(made.late_s) == 3


def test_refusals_before_the_deadline_are_those_before_the_first_token_was_due() -> None:
    refusals = [call(refused="queue_timeout", ended_s=s) for s in (0.1, 1.0, 1.2, 30.0)]
    assert Judgement(tuple(refusals)).refusals_before_deadline == 0.5


def test_a_call_that_is_refused_after_its_first_token_counts_as_admitted() -> None:
    cut_off = call(0.1, refused="node_lost")
    made = Judgement((cut_off,))
    assert made.admitted == made.torn == (cut_off,)
    assert made.refused_by_reason == {"node_lost": 1}


@pytest.mark.parametrize(
    ("answer", "finished", "once"),
    [
        (WHOLE, True, True),
        (replace(WHOLE, tokens_s=(1.0, 1.1)), False, False),
        (replace(WHOLE, finishes=2), False, False),
        (replace(WHOLE, finishes=0), False, False),
        (replace(WHOLE, in_order=False), False, False),
        (replace(WHOLE, refused="memory_full"), False, False),
        (replace(WHOLE, failed="unavailable"), False, False),
        (Answer(ended_s=1.0, tokens_s=(), refused="memory_full"), False, True),
        (Answer(ended_s=1.0, tokens_s=(0.5,), refused="memory_full"), False, True),
        (Answer(ended_s=1.0, tokens_s=(), failed="deadline_exceeded"), False, False),
    ],
)
def test_a_call_ends_whole_or_with_a_reason(answer: Answer, finished: bool, once: bool) -> None:
    made = judge([CALL], [answer])
    assert made.finished == finished
    assert made.odd_ends == ({} if once else {answer.failed or "torn": 1})


def test_promises_are_judged_of_those_that_were_to_be_in_time() -> None:
    made = Judgement(
        (
            call(0.1, 0.2, 0.3),
            call(0.5, 1.15, 1.19),
            call(0.1, 0.2, 1.21),
            call(2.0, 2.1, 2.2, accepted=True, grace_s=0.5),
            call(1.4, 1.5, 1.6, accepted=True, grace_s=0.5),
            call(accepted=True, refused="node_lost"),
            call(refused="queue_full"),
        )
    )
    assert (len(made.admitted), len(made.promised)) == (6, 4)
    assert made.met_of_admitted == pytest.approx(1 / 4)
    assert made.met_of_admitted_in_the_mean == pytest.approx(1 / 4)
    assert made.late_over_told == pytest.approx((0.8, 2.0))
    assert (made.met, made.refused_by_reason) == (2, {"node_lost": 1, "queue_full": 1})


def test_both_measures_are_told_apart() -> None:
    stalled, stretched = call(0.1, 0.29, 0.3), call(0.1, 0.25, 0.4)
    late_once = call(1.0, 1.19, 1.2)
    assert Judgement((stalled, stretched)).met_of_admitted == 1.0
    assert Judgement((stalled, stretched)).met_of_admitted_in_the_mean == 0.5
    assert Judgement((stalled, late_once)).met_of_admitted == 0.5
    assert Judgement((stalled, late_once)).met_of_admitted_in_the_mean == 1.0
    assert (Judgement(()).met_of_admitted, Judgement(()).met_of_admitted_in_the_mean) == (0.0, 0.0)


def test_calls_are_counted_by_the_node_of_their_last_token() -> None:
    made = Judgement((call(0.1, node="a"), call(0.1, node="b"))) + Judgement((call(0.2, node="a"),))
    assert (made.served_by("a"), made.served_by("b"), made.served_by("c")) == (2, 1, 0)
