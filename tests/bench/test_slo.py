"""Which calls count as served in time, and how many there are."""

import pytest

from bench.slo.judging import Judgement, Outcome, jain
from bench.slo.workload import OUTPUT_TOKENS, PROMPT_TOKENS, SLOS, Costs, calls
from mesh.compute.times import Times
from mesh.domain.ids import DeploymentName
from mesh.evaluation.load_client import Answer, Call
from tests.support.profiles import PROFILE

CALL = Call(
    at_s=0.0,
    deployment=DeploymentName("slo-a"),
    slo=SLOS["slo-a"],
    prompt_tokens=(7,) * 100,
    output_tokens=3,
)
"""Its first token is due after 1 s, each further one 0.1 s later."""


def outcome(*tokens_s: float, ended_s: float = 5.0, refused: str = "", failed: str = "") -> Outcome:
    answer = Answer(ended_s=ended_s, tokens_s=tokens_s, refused=refused, failed=failed)
    return Outcome(call=CALL, answer=answer)


def test_a_call_meets_its_slo_when_each_token_comes_by_its_own_deadline() -> None:
    assert outcome(1.0, 1.1, 1.2).met
    assert outcome(0.2, 1.1, 1.15).met, "early tokens do not move the deadlines of later ones"
    assert not outcome(1.01, 1.02, 1.03).met
    assert not outcome(0.1, 0.2, 1.25).met


def test_a_call_that_lacks_tokens_does_not_meet_its_slo() -> None:
    assert not outcome(0.1, 0.2).met
    assert not outcome(failed="unavailable").met


def test_lateness_is_that_of_the_latest_token() -> None:
    assert outcome(1.5, 1.6, 1.3).late_s == pytest.approx(0.5)


def test_a_refused_call_is_not_admitted_and_not_late() -> None:
    judged = Judgement(
        outcomes=(
            outcome(0.1, 0.2, 0.3),
            outcome(refused="first_token_late", ended_s=0.9),
            outcome(refused="delays_running", ended_s=1.1),
            outcome(2.0, 2.1, 2.2),
        )
    )
    assert (judged.requests, judged.admitted, judged.met) == (4, 2, 1)
    assert judged.refused_by_reason == {"delays_running": 1, "first_token_late": 1}
    assert list(judged.late_s) == pytest.approx([1.0])


def test_late_with_the_first_token_is_told_from_late_with_a_later_one() -> None:
    judged = Judgement(outcomes=(outcome(1.1, 1.15, 1.16), outcome(0.5, 1.2, 1.2), outcome()))
    assert judged.late_first == 1
    assert len(judged.late_s) == 3


def test_refusals_before_the_deadline_are_those_before_the_first_token_was_due() -> None:
    refusals = [outcome(refused="queue_timeout", ended_s=s) for s in (0.1, 1.0, 1.2, 30.0)]
    assert Judgement(outcomes=tuple(refusals)).refusals_before_deadline == 0.5


def test_a_call_that_is_refused_after_its_first_token_counts_as_admitted() -> None:
    assert outcome(0.1, refused="node_lost").admitted


def test_jain_is_one_for_equal_shares_and_a_share_for_one_that_has_all() -> None:
    assert jain([0.4, 0.4, 0.4, 0.4]) == pytest.approx(1.0)
    assert jain([0.9, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_calls_come_to_as_much_work_as_asked_for_in_order_and_within_the_run() -> None:
    costs = Costs(Times(PROFILE))
    sent = calls(costs, load=2.0, seconds=30.0, seed=3)
    work_s = sum(costs.call_s(call) for call in sent)
    assert work_s == pytest.approx(60.0, abs=max(costs.call_s(call) for call in sent))
    assert [call.at_s for call in sent] == sorted(call.at_s for call in sent)
    assert 0.0 <= sent[0].at_s <= sent[-1].at_s <= 30.0
    assert {call.deployment for call in sent} == set(SLOS)
    assert all(
        PROMPT_TOKENS[0] <= len(call.prompt_tokens) <= PROMPT_TOKENS[1]
        and OUTPUT_TOKENS[0] <= call.output_tokens <= OUTPUT_TOKENS[1]
        for call in sent
    )


def test_the_same_seed_draws_the_same_calls() -> None:
    costs = Costs(Times(PROFILE))
    first = calls(costs, load=1.0, seconds=10.0, seed=5)
    assert first == calls(costs, load=1.0, seconds=10.0, seed=5)
    assert first != calls(costs, load=1.0, seconds=10.0, seed=6)


def test_capacity_is_the_largest_batch_whose_decodes_keep_every_tpot() -> None:
    slow = Costs(Times(PROFILE, 10.0))
    rounds_per_s = sum(1 / slo.tpot_s for slo in SLOS.values())
    context = sum(PROMPT_TOKENS) / 2 + sum(OUTPUT_TOKENS) / 4
    times = Times(PROFILE, 10.0)
    assert times.decode_s(slow.batch, context) * rounds_per_s <= 1.0
    assert times.decode_s(slow.batch + 1, context) * rounds_per_s > 1.0
