"""Outcomes and their numbers: what counts as in time."""

from dataclasses import replace

import pytest

from mesh.domain.ids import DeploymentName, RequestId
from mesh.domain.outcome import Outcome
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.domain.slo import Slo
from mesh.evaluation.summary import summarize

GOOD = Outcome(
    request_id=RequestId("r"),
    deployment=DeploymentName("chat"),
    slo=Slo(ttft_s=1.0, ttft_tokens_per_s=512, tpot_s=0.1),
    arrival_s=10.0,
    input_tokens=100,
    tokens_s=(11.0, 11.1, 11.2),
    ended_s=11.2,
    end=FinishReason.LENGTH,
)


def test_tokens_at_their_deadlines_are_in_time() -> None:
    assert GOOD.late_s == pytest.approx(0.0)
    early = replace(GOOD, tokens_s=(10.9, 11.0, 11.1))
    assert (early.met, early.met_without_grace, early.met_in_the_mean) == (True, True, True)
    assert early.ttft_s == pytest.approx(0.9)
    assert early.tpot_s == pytest.approx(0.1)


def test_one_late_token_breaks_the_slo_but_not_the_mean() -> None:
    late = replace(GOOD, tokens_s=(10.9, 11.35, 11.05), slo=replace(GOOD.slo, tpot_s=0.2))
    assert not late.met
    assert late.met_in_the_mean


def test_what_only_a_load_made_late_is_judged_by_what_it_was_told_and_by_its_slo() -> None:
    cold = replace(GOOD, tokens_s=(12.0, 12.1), accepted=True, grace_s=1.5)
    assert (cold.met, cold.met_in_the_mean) == (True, True)
    assert (cold.met_without_grace, cold.met_in_the_mean_without_grace) == (False, False)
    assert not cold.promised_in_time
    assert cold.late_over_told == pytest.approx(1.0 / 1.5)
    assert replace(cold, tokens_s=(13.0, 13.1)).late_over_told == pytest.approx(2.0 / 1.5)
    assert replace(cold, tokens_s=(10.5, 10.6)).late_over_told == pytest.approx(-0.5 / 1.5)


def test_nothing_is_late_over_what_was_not_told_or_never_came() -> None:
    assert GOOD.late_over_told is None
    assert replace(GOOD, tokens_s=(), accepted=True, grace_s=1.5).late_over_told is None


@pytest.mark.parametrize(
    ("accepted", "tokens_s", "end", "admitted"),
    [
        (True, (), RefusalReason.NODE_LOST, True),
        (False, (11.0,), RefusalReason.NODE_LOST, True),
        (False, (), RefusalReason.QUEUE_FULL, False),
        (False, (), FinishReason.FAILED, True),
    ],
)
def test_who_was_refused_before_it_had_a_place_was_promised_nothing(
    accepted: bool, tokens_s: tuple[float, ...], end: FinishReason | RefusalReason, admitted: bool
) -> None:
    made = replace(GOOD, accepted=accepted, tokens_s=tokens_s, end=end)
    assert (made.admitted, made.promised_in_time) == (admitted, admitted)


def test_a_request_that_did_not_finish_met_nothing() -> None:
    cut = replace(GOOD, tokens_s=(10.5,), end=RefusalReason.NODE_LOST)
    assert [cut.met, cut.met_in_the_mean, cut.finished] == [False] * 3


def test_a_summary_counts_each_once() -> None:
    refused = replace(GOOD, tokens_s=(), end=RefusalReason.FIRST_TOKEN_LATE)
    early = replace(GOOD, tokens_s=(10.5, 10.6, 10.7))
    made = summarize([early, early, refused])
    assert (made.requests, made.finished, made.met, made.output_tokens) == (3, 2, 2, 6)
    assert made.refused == (("first_token_late", 1),)
    assert made.ttft_s_p50 == pytest.approx(0.5)
    assert summarize([]).ttft_s_p95 is None
