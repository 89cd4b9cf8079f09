"""Policies by name."""

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.reasons import DeviceKind, TurnRule
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


def test_the_ablations_are_the_default_policy_with_a_part_left_out() -> None:
    assert policy("llm-mesh-no-cpu").devices == (DeviceKind.GPU,)
    assert policy("llm-mesh-no-sharing").partitions == 1
    assert not policy("llm-mesh-no-preemption").preempts
    without = policy("llm-mesh-no-defrag")
    assert (without.preempts, without.consolidates) == (False, False)


@pytest.mark.parametrize("name", ["sllm", "sllm+cpu", "sllm+cpu+share"])
def test_serverless_llm_cuts_nodes_into_parts_and_validates_nothing(name: str) -> None:
    chosen = policy(name)
    assert chosen.partitions == (2 if name.endswith("share") else 1)
    assert (DeviceKind.CPU in chosen.devices) == ("cpu" in name)
    assert not chosen.validates
