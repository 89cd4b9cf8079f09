"""A whole cell of real processes: deploy, invoke, stream, and the turn rule of a policy file."""

from pathlib import Path

from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted
from mesh.domain.node_events import LinkOpened
from mesh.domain.reasons import FinishReason
from mesh.policy.rules.registry import rule_named
from mesh.runtime.journal import NodeStart, read_journal
from mesh.runtime.policies import rule_of_file
from tests.e2e.live_cell import ROOT, WAIT_S_MAX, LiveCell

WEIGHTED_TURNS = ROOT / "examples/policies/weighted_turns.py"


def test_a_deployed_model_answers_and_its_tokens_stream(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("n1", "--step-s", "0.03")
    assert cell.deploy("chat", tiny_model) == "deployed"
    assert cell.deploy("chat", tiny_model) == "unchanged"
    deployed = cell.client.get(DeploymentName("chat"))
    assert deployed.model is not None
    assert deployed.model.architecture == "llama"

    answer = cell.invoke("chat", "hello", max_tokens=12)
    finished = answer.finished()
    assert finished.reason is FinishReason.LENGTH
    assert (finished.prompt_tokens, finished.output_tokens) == (5, 12)
    (accepted,) = (event for event in answer.events if isinstance(event, Accepted))
    assert accepted.grace_s == finished.grace_s == 0.0, "the load is quick enough"
    assert len(answer.text) > 0
    spread_s = answer.arrivals_s[-1] - answer.arrivals_s[0]
    assert spread_s > 0.03 * 5, "tokens came one by one, as the iterations made them"

    again = cell.invoke("chat", "hello", max_tokens=12)
    assert again.finished().grace_s == 0.0, "the second found it running"
    assert again.token_ids == answer.token_ids


def test_nodes_compute_by_the_rule_of_the_policy_file(cell: LiveCell, tiny_model: Path) -> None:
    policy = ("--policy", str(WEIGHTED_TURNS))
    cell.start_controller(*policy)
    refused = cell.start_node("n1", join=False)
    assert refused.popen.wait(WAIT_S_MAX) == 1
    assert "start the node with --policy and the same file" in refused.log_text()
    cell.journals = True
    node = cell.start_node("n2", options=policy)
    cell.deploy("chat", tiny_model)
    assert cell.invoke("chat", "hello", max_tokens=12).finished().output_tokens == 12
    start, decisions = read_journal(node.journal)
    opened = next(d.event for d in decisions if isinstance(d.event, LinkOpened))
    assert opened.rule.turn.name == "weighted_turns"
    assert isinstance(start, NodeStart)
    own = rule_of_file(start.policy)
    assert rule_named(opened.rule.turn, own) == own
