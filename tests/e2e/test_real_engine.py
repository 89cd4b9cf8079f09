"""The node agent as users run it, engine and all, on a tiny model; its journal replays."""

from pathlib import Path

from mesh.core.controller import ControllerCore
from mesh.core.node import NodeCore
from mesh.domain.reasons import FinishReason
from mesh.policy.registry import policy
from mesh.runtime.journal import ControllerStart, NodeStart, read_journal, replay
from tests.e2e.live_cell import LiveCell

CLIENTS = 4


def test_a_real_node_serves_and_both_journals_replay_to_the_same_decisions(
    cell: LiveCell, tiny_model: Path
) -> None:
    controller = cell.start_controller()
    node = cell.start_real_node("cpu0")
    cell.deploy("chat", tiny_model, keep_alive_s=0.2)
    answers = [cell.invoke("chat", f"question {n}", max_tokens=24) for n in range(CLIENTS)]
    for answer in answers:
        finished = answer.finished()
        assert (finished.reason, finished.output_tokens) == (FinishReason.LENGTH, 24)
    again = cell.invoke("chat", "question 0", max_tokens=24)
    again.finished()
    alone = cell.invoke("chat", "question 0", max_tokens=24)
    alone.finished()
    assert alone.token_ids == again.token_ids
    cell.wait_for("the idle instance to go", lambda: cell.instance_count("chat") == 0)
    assert node.terminate() == 0
    cell.wait_for("the node to be gone", lambda: not cell.client.nodes())
    assert controller.terminate() == 0

    start, decisions = read_journal(node.journal)
    assert isinstance(start, NodeStart)
    taken = list(decisions)
    assert len(taken) > 24
    assert replay(NodeCore(limits=start.limits), iter(taken)) is None

    start, decisions = read_journal(controller.journal)
    assert isinstance(start, ControllerStart)
    core = ControllerCore(
        epoch=start.epoch,
        deployments=start.deployments,
        limits=start.limits,
        policy=policy(start.policy),
    )
    taken = list(decisions)
    assert len(taken) > 24
    assert replay(core, iter(taken)) is None
