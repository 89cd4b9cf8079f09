"""How many calls the SLO benchmark sends, and when."""

import pytest

from bench.slo.workload import CONTEXT_TOKENS, SLOS, Costs, jain
from mesh.compute.times import Times
from mesh.evaluation.bursts import INPUT_TOKENS, OUTPUT_TOKENS
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
