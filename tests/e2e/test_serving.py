"""A whole cell of real processes: deploy, invoke, stream, many clients, clients that leave."""

from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, NotFound, Refused
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted, Invocation, TextPrompt, Tokens
from mesh.domain.messages import AbortRequest
from mesh.domain.node_events import CommandReceived, LinkOpened, StepFinished
from mesh.domain.reasons import FinishReason, RefusalReason
from mesh.policy.rules.registry import rule_named
from mesh.runtime.journal import NodeStart, read_journal
from mesh.runtime.policies import rule_of_file
from tests.e2e.live_cell import ROOT, WAIT_S_MAX, LiveCell

CLIENTS = 8
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


def test_clients_of_one_batch_get_their_own_answers(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("n1", "--step-s", "0.02")
    cell.deploy("chat", tiny_model)
    prompts = [f"prompt number {n}" for n in range(CLIENTS)]
    alone = [cell.invoke("chat", prompt, max_tokens=20) for prompt in prompts[:2]]
    expected = [answer.finished() and answer.token_ids for answer in alone]

    answers = [cell.invoke("chat", prompt, max_tokens=20) for prompt in prompts]
    for answer in answers:
        assert answer.finished().output_tokens == 20
    assert [answer.token_ids for answer in answers[:2]] == expected
    assert len({tuple(answer.token_ids) for answer in answers}) == CLIENTS
    firsts = [answer.arrivals_s[0] for answer in answers]
    ends = [answer.arrivals_s[-1] for answer in answers]
    assert max(firsts) < min(ends), "they were served together, not one after the other"


def test_who_leaves_frees_its_place_within_an_iteration(cell: LiveCell, tiny_model: Path) -> None:
    """The node's journal is the witness: every iteration after the abort carries one request."""
    cell.journals = True
    node = cell.start("n1", "--step-s", "0.03")
    cell.deploy("chat", tiny_model)
    stays = cell.invoke("chat", "stays", max_tokens=60)
    cell.wait_tokens(stays, 1)
    leaves = cell.client.invoke(
        Invocation(
            deployment=DeploymentName("chat"),
            prompt=TextPrompt(text="leaves"),
            max_tokens=400,
            ignore_eos=True,
        )
    )
    seen = (event for event in leaves if isinstance(event, Tokens))
    for _ in range(3):
        next(seen)
    leaves.close()
    cell.wait_for("the place to be free", lambda: _batch(cell) == 1)
    assert not stays.ended.is_set()
    assert stays.finished().output_tokens == 60
    status = cell.client.status()
    assert (status.running, status.queued) == (0, 0)

    batches = _batches_after_abort(node.journal)
    assert batches[0] in (1, 2), "the iteration under way may end with both"
    assert batches[1:] == [1] * (len(batches) - 1)
    assert len(batches) > 5


def test_refusals_have_their_reason_and_serving_goes_on(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("n1")
    with pytest.raises(NotFound, match="nobody"):
        cell.invoke("nobody", "hello", max_tokens=4).finished()
    cell.deploy("chat", tiny_model)
    assert cell.deploy("chat", tiny_model, keep_alive_s=7.0) == "revision 2 serves"
    with pytest.raises(Refused, match="600 tokens; the context of 'chat' holds 512") as raised:
        cell.invoke("chat", "x" * 600, max_tokens=4).finished()
    assert raised.value.reason is RefusalReason.PROMPT_TOO_LONG
    for max_tokens in (0, -1):
        with pytest.raises(InvalidInput, match=f"max_tokens is {max_tokens}"):
            cell.invoke("chat", "hello", max_tokens=max_tokens).finished()
    full = cell.invoke("chat", "x" * 500, max_tokens=400).finished()
    assert (full.reason, full.output_tokens) == (FinishReason.LENGTH, 12), "the context is full"
    assert cell.invoke("chat", "still serving", max_tokens=4).finished().output_tokens == 4


def _batch(cell: LiveCell) -> int:
    """Requests in the batch of the only instance."""
    (instance,) = cell.client.get(DeploymentName("chat")).instances
    return instance.batch


def _batches_after_abort(journal: Path) -> list[int]:
    """How many requests each iteration carried that ended after the node was told to abort one."""
    _, decisions = read_journal(journal)
    events = [decision.event for decision in decisions]
    (aborted,) = [
        n
        for n, event in enumerate(events)
        if isinstance(event, CommandReceived) and isinstance(event.command, AbortRequest)
    ]
    return [e.result.decode_batch for e in events[aborted:] if isinstance(e, StepFinished)]
