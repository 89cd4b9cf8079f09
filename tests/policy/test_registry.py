"""Policies by name."""

from dataclasses import replace
from math import nan

import pytest

from mesh.domain.errors import InvalidInput
from mesh.domain.limits import CellLimits
from mesh.domain.node_rule import NodeRule
from mesh.domain.reasons import DeviceKind
from mesh.policy.default_answers import DefaultAnswers
from mesh.policy.interface import checked
from mesh.policy.llm_mesh import LLM_MESH, LlmMesh
from mesh.policy.registry import DEFAULT_POLICY, policy
from mesh.policy.rules.first_come import FIRST_COME
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.sllm import Sllm


def test_a_policy_is_found_by_its_name_and_an_unknown_one_lists_the_known() -> None:
    assert policy(DEFAULT_POLICY).name == DEFAULT_POLICY
    with pytest.raises(InvalidInput, match="no policy 'nope'") as caught:
        policy("nope")
    assert DEFAULT_POLICY in caught.value.hint


def made(name: str) -> DefaultAnswers:
    found = policy(name)
    assert isinstance(found, DefaultAnswers)
    return found


def ablation(name: str) -> LlmMesh:
    found = policy(name)
    assert isinstance(found, LlmMesh)
    return found


def test_the_default_keeps_slos_and_the_baseline_computes_in_the_order_of_arrival() -> None:
    chosen, baseline = made(DEFAULT_POLICY), made("fcfs")
    assert (chosen.rule, chosen.promises) == (HEADROOM, True)
    assert (baseline.rule, baseline.promises) == (FIRST_COME, False)


def test_the_ablations_are_the_default_policy_with_a_part_left_out() -> None:
    assert policy("llm-mesh-no-cpu").devices == (DeviceKind.GPU,)
    assert not ablation("llm-mesh-no-sharing").shares
    assert not ablation("llm-mesh-no-preemption").preempts
    without = ablation("llm-mesh-no-defrag")
    assert (without.preempts, without.consolidates) == (False, False)


@pytest.mark.parametrize("name", ["sllm", "sllm+cpu", "sllm+cpu+share"])
def test_serverless_llm_cuts_nodes_into_parts_and_validates_nothing(name: str) -> None:
    chosen = policy(name)
    assert isinstance(chosen, Sllm)
    assert chosen.parts == (2 if name.endswith("share") else 1)
    assert (DeviceKind.CPU in chosen.devices) == ("cpu" in name)
    assert not chosen.promises


@pytest.mark.parametrize(
    "rule", [NodeRule(overestimate=0.0), NodeRule(chunk_tokens_max=0), NodeRule(turn_s_max=nan)]
)
def test_a_rule_with_numbers_that_cannot_be_meant_is_no_rule(rule: NodeRule) -> None:
    with pytest.raises(InvalidInput, match=r"node_rule\..* must be at least"):
        checked(replace(LLM_MESH, node_rule=rule))


def test_nodes_are_told_a_rule_within_the_bounds_of_the_cell() -> None:
    own = NodeRule(overestimate=1.3, chunk_tokens_max=64, turn_s_max=0.2)
    told = own.within(CellLimits(prefill_tokens_max=256, turn_s_max=0.05))
    assert told == NodeRule(overestimate=1.3, chunk_tokens_max=64, turn_s_max=0.05)


def test_a_policy_cannot_promise_by_turns_that_validation_does_not_model() -> None:
    wrong = replace(made("fcfs"), promises=True)
    with pytest.raises(InvalidInput, match="nothing can be promised by its turn rule 'first_come'"):
        checked(wrong)
