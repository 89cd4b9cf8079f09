"""How many calls the SLO benchmark sends, and when; what is said of bursts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench import slo_bursts as bursts
from bench.slo import CONTEXT_TOKENS, SLOS, Costs, jain
from bench.slo_bursts import Burst
from mesh.compute.times import Times
from mesh.evaluation.bursts import INPUT_TOKENS, OUTPUT_TOKENS
from mesh.evaluation.judging import judge
from mesh.evaluation.load_client import Answer, Call
from tests.support.profiles import PROFILE


def test_jain_is_one_for_equal_shares_and_a_share_for_one_that_has_all() -> None:
    assert jain([0.4, 0.4, 0.4, 0.4]) == pytest.approx(1.0)
    assert jain([0.9, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_calls_come_to_as_much_work_as_asked_for_in_order_and_within_the_run() -> None:
    costs = Costs(Times(PROFILE))
    sent = costs.calls(load=2.0, seconds=30.0, seed=3)
    work_s = sum(costs.call_s(call) for call in sent)
    assert work_s == pytest.approx(60.0, abs=max(costs.call_s(call) for call in sent))
    assert [call.at_s for call in sent] == sorted(call.at_s for call in sent)
    assert 0.0 <= sent[0].at_s <= sent[-1].at_s <= 30.0
    assert {call.deployment for call in sent} == set(SLOS)
    assert all(
        INPUT_TOKENS[0] <= len(call.prompt_tokens) <= INPUT_TOKENS[1]
        and OUTPUT_TOKENS[0] <= call.output_tokens <= OUTPUT_TOKENS[1]
        for call in sent
    )


def test_the_same_seed_draws_the_same_calls() -> None:
    costs = Costs(Times(PROFILE))
    first = costs.calls(load=1.0, seconds=10.0, seed=5)
    assert first == costs.calls(load=1.0, seconds=10.0, seed=5)
    assert first != costs.calls(load=1.0, seconds=10.0, seed=6)


def test_capacity_is_the_largest_batch_whose_decodes_keep_every_tpot() -> None:
    slow = Costs(Times(PROFILE, 10.0))
    rounds_per_s = sum(1 / slo.tpot_s for slo in SLOS.values())
    times = Times(PROFILE, 10.0)
    assert times.decode_s(slow.batch, CONTEXT_TOKENS) * rounds_per_s <= 1.0
    assert times.decode_s(slow.batch + 1, CONTEXT_TOKENS) * rounds_per_s > 1.0


CALL = Call(
    at_s=0.0,
    deployment=bursts.NAME,
    slo=bursts.SLO,
    prompt_tokens=(7,),
    output_tokens=2,
)
MET = Answer(ended_s=2.1, tokens_s=(1.9, 2.0), finishes=1)
UNEVEN = replace(MET, tokens_s=(1.9, 2.1))
"""Every token in time, for the first came early; the second took longer than its share."""
REFUSED = Answer(ended_s=0.1, tokens_s=(), refused="tpot_exceeded", retry_after_s=2.0)


def burst(first: list[Answer], again: Sequence[Answer] = ()) -> Burst:
    return Burst(
        first=judge([CALL] * len(first), first), again=judge([CALL] * len(again), list(again))
    )


def test_a_burst_is_drawn_from_the_seed_and_comes_at_once() -> None:
    sent = bursts.calls(64, 3)
    assert sent == bursts.calls(64, 3) != bursts.calls(64, 4)
    assert (len(sent), {call.at_s for call in sent}) == (64, {0.0})
    assert len({call.prompt_tokens for call in sent}) == 64


def test_figures_of_bursts_are_by_burst_or_of_all_of_them() -> None:
    late = replace(REFUSED, ended_s=2.5)
    made = [
        burst([MET] * 15 + [UNEVEN]),
        burst([MET] * 32 + [REFUSED] * 31 + [late], [MET] * 31 + [REFUSED]),
    ]
    found = bursts.figures(made)
    assert found == {
        "burst_calls": [16, 64],
        "burst_admitted": [16, 32],
        "burst_met": [16, 32],
        "burst_met_in_the_mean": [15, 32],
        "burst_met_of_admitted": pytest.approx(47 / 48, abs=1e-4),
        "burst_refused_by_reason": [{}, {"tpot_exceeded": 32}],
        "refusal_s_p50": 0.1,
        "refused_after_deadline": 1,
        "came_again": 32,
        "again_admitted": pytest.approx(31 / 32, abs=1e-4),
    }
    assert bursts.targets(made) == {
        "refusal_s_p50": True,
        "refused_after_deadline": False,
        "burst_met_of_admitted": False,
        "burst_met": False,
        "again_admitted": True,
    }
    assert [len(row) for row in bursts.rows(made)] == [len(bursts.HEADINGS)] * 2


@pytest.mark.parametrize(
    ("again", "reached"),
    [([MET] * 9 + [REFUSED], True), ([MET] * 8 + [REFUSED] * 2, False), ([], False)],
)
def test_who_is_refused_is_told_when_there_will_be_a_place(
    again: list[Answer], reached: bool
) -> None:
    missed = {
        name
        for name, kept in bursts.targets([burst([MET] * 32 + [REFUSED] * 224, again)]).items()
        if not kept
    }
    assert missed == (set() if reached else {"again_admitted"})


def test_a_burst_of_which_nobody_is_refused_needs_no_retry() -> None:
    assert all(bursts.targets([burst([MET] * 16)]).values())
