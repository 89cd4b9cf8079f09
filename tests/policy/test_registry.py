"""Policies by name."""

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.reasons import TurnRule
from mesh.policy.registry import DEFAULT_POLICY, policy


def test_a_policy_is_found_by_its_name_and_an_unknown_one_lists_the_known() -> None:
    assert policy(DEFAULT_POLICY).name == DEFAULT_POLICY
    with pytest.raises(InvalidInput, match="no policy 'nope'") as caught:
        policy("nope")
    assert DEFAULT_POLICY in caught.value.hint


def test_the_default_keeps_slos_and_the_baseline_computes_in_the_order_of_arrival() -> None:
    chosen, baseline = policy(DEFAULT_POLICY), policy("fcfs")
    assert (chosen.name, chosen.turns, chosen.validates) == ("llm-mesh", TurnRule.HEADROOM, True)
    assert (baseline.turns, baseline.validates) == (TurnRule.FIRST_COME, False)
