"""Nodes that die, come back, share a name or are drained: clients lose and repeat no token."""

import signal
from pathlib import Path

import pytest

from mesh.domain.errors import Refused
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.lifecycle import NodeState
from mesh.domain.reasons import RefusalReason
from tests.e2e.live_cell import WAIT_S_MAX, LiveCell

STEP = ("--step-s", "0.03")
TOKENS = 60


def test_a_killed_nodes_requests_continue_elsewhere_and_it_serves_again(
    cell: LiveCell, tiny_model: Path
) -> None:
    first = cell.start("n1", *STEP)
    cell.deploy("chat", tiny_model)
    undisturbed = cell.invoke("chat", "to be continued", max_tokens=TOKENS)
    undisturbed.finished()
    second = cell.start_node("n2", *STEP)

    answers = [cell.invoke("chat", "to be continued", max_tokens=TOKENS) for _ in range(3)]
    for answer in answers:
        cell.wait_tokens(answer, 5)
    first.kill()
    assert all(not answer.ended.is_set() for answer in answers), "the kill came amid the answers"
    for answer in answers:
        assert answer.finished().output_tokens == TOKENS
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
    cell.wait_for("the lost node to be forgotten", lambda: cell.node("n1") is None)
    cell.start_node("n1")
    second.kill()
    cell.wait_for("the other node to be forgotten", lambda: cell.node("n2") is None)
    assert cell.invoke("chat", "again", max_tokens=5).finished().output_tokens == 5


def test_a_frozen_node_comes_back_without_its_requests(cell: LiveCell, tiny_model: Path) -> None:
    """Its connection stays open, so that only its silence tells."""
    frozen = cell.start("n1", *STEP, controller=["--lease-s", "2.5"])
    cell.deploy("chat", tiny_model)
    cell.warm("chat")
    cell.start_node("n2", *STEP)
    answer = cell.invoke("chat", "stalled", max_tokens=TOKENS)
    cell.wait_tokens(answer, 5)
    frozen.freeze()
    assert answer.finished().output_tokens == TOKENS
    assert cell.node("n1") is None
    frozen.thaw()
    cell.wait_for("the thawed node to come back", lambda: cell.node("n1"))
    back = cell.node("n1")
    assert back is not None
    assert [instance.batch for instance in back.instances] in ([], [0])
    again = cell.invoke("chat", "stalled", max_tokens=5)
    again.finished()
    assert again.token_ids == answer.token_ids[:5]


def test_a_failed_iteration_costs_a_reload_and_no_token(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("n1", "--fail-steps", "1")
    cell.deploy("chat", tiny_model)
    answers = [cell.invoke("chat", f"through it {n}", max_tokens=20) for n in range(3)]
    for answer in answers:
        assert answer.finished().output_tokens == 20


def test_without_another_node_requests_are_refused_soon(cell: LiveCell, tiny_model: Path) -> None:
    only = cell.start("n1", *STEP, controller=["--queue-wait-s", "1.5"])
    cell.deploy("chat", tiny_model)
    answer = cell.invoke("chat", "nobody left", max_tokens=400)
    cell.wait_tokens(answer, 3)
    only.kill()
    assert answer.ended.wait(WAIT_S_MAX)
    with pytest.raises(Refused) as raised:
        answer.finished()
    assert raised.value.reason is RefusalReason.NODE_LOST
    assert "its node was lost" in raised.value.message


def test_the_second_node_of_a_name_is_sent_away(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("twin", *STEP)
    cell.deploy("chat", tiny_model)
    answer = cell.invoke("chat", "undisturbed", max_tokens=TOKENS)
    cell.wait_tokens(answer, 1)
    second = cell.start_node("twin", join=False)
    assert second.popen.wait(WAIT_S_MAX) == 1
    lines = second.log_text().splitlines()
    assert any(line.startswith("error: ") and "twin" in line for line in lines), lines
    assert any(line.startswith("hint: ") and "--name" in line for line in lines), lines
    assert answer.finished().output_tokens == TOKENS


def test_a_drained_node_ends_what_it_has_and_no_more(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("n1", *STEP)
    cell.deploy("chat", tiny_model)
    cell.warm("chat")
    cell.start_node("n2", *STEP)
    answer = cell.invoke("chat", "old work", max_tokens=TOKENS)
    cell.wait_tokens(answer, 1)
    cell.client.drain(NodeId("n1"))
    fresh = cell.invoke("chat", "new work", max_tokens=5)
    assert fresh.finished().output_tokens == 5
    busy = cell.node("n2")
    assert busy is not None
    assert [i.deployment for i in busy.instances] == ["chat"]
    assert answer.finished().output_tokens == TOKENS
    cell.wait_for("n1 to be empty", lambda: (node := cell.node("n1")) and not node.instances)
    drained = cell.node("n1")
    assert drained is not None
    assert drained.state is NodeState.DRAINING

    cell.client.drain(NodeId("n1"), undo=True)
    ready = cell.node("n1")
    assert ready is not None
    assert ready.state is NodeState.READY


def test_a_node_that_is_asked_to_stop_does_so_in_time(cell: LiveCell, tiny_model: Path) -> None:
    """Even amid requests; with a second node they go on there."""
    first = cell.start("n1", *STEP)
    cell.deploy("chat", tiny_model)
    cell.warm("chat")
    cell.start_node("n2", *STEP)
    answer = cell.invoke("chat", "handed over", max_tokens=TOKENS)
    cell.wait_tokens(answer, 3)
    assert first.terminate() == 0
    assert answer.finished().output_tokens == TOKENS


def test_a_node_stops_in_time_amid_an_endless_load(cell: LiveCell, tiny_model: Path) -> None:
    node = cell.start("n1", "--load-s", "600")
    cell.deploy("chat", tiny_model)
    cell.invoke("chat", "never loaded", max_tokens=5)

    def loading() -> bool:
        instances = cell.client.get(DeploymentName("chat")).instances
        return [instance.phase for instance in instances] == ["pretend"]

    cell.wait_for("the load to be under way", loading)
    assert node.terminate() == 0


def test_a_node_that_is_to_stop_is_drained_first(cell: LiveCell, tiny_model: Path) -> None:
    """SIGTERM as Kubernetes and systemd send it: its answers end, or go on elsewhere, unbroken."""
    cell.start_controller()
    leaves = cell.start_node("n1", *STEP, options=("--grace-s", "30"))
    cell.deploy("chat", tiny_model)
    answer = cell.invoke("chat", "before it goes", max_tokens=TOKENS)
    cell.wait_tokens(answer, 5)
    leaves.popen.send_signal(signal.SIGTERM)
    cell.wait_for("the node to be drained", lambda: is_draining(cell))
    assert leaves.popen.poll() is None
    with pytest.raises(Refused):
        cell.invoke("chat", "no new work", max_tokens=1).finished()
    assert answer.finished().output_tokens == TOKENS
    assert leaves.popen.wait(WAIT_S_MAX) == 0
    assert "not drained" not in leaves.log_text()


def is_draining(cell: LiveCell) -> bool:
    node = cell.node("n1")
    return node is not None and node.state is NodeState.DRAINING


def test_a_drain_before_the_stop_has_a_bound(cell: LiveCell, tiny_model: Path) -> None:
    cell.start_controller()
    leaves = cell.start_node("n1", "--step-s", "0.5", options=("--grace-s", "3"))
    cell.deploy("chat", tiny_model)
    cell.wait_tokens(cell.invoke("chat", "too long", max_tokens=TOKENS), 2)
    leaves.popen.send_signal(signal.SIGTERM)
    assert leaves.popen.wait(WAIT_S_MAX) == 0
    assert "not drained after 3 s" in leaves.log_text()
