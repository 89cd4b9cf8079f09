"""The node agent as users run it, engine and all, on a tiny model; its journal replays."""

from pathlib import Path

from mesh.domain.reasons import FinishReason
from mesh.evaluation.replaying import replay_journal
from tests.e2e.live_cell import LiveCell

CLIENTS = 4


def test_a_real_node_serves_and_both_journals_replay_to_the_same_decisions(
    cell: LiveCell, tiny_model: Path
) -> None:
    cell.journals = True
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

    of_node = replay_journal(node.journal)
    assert (of_node.core, of_node.other) == ("node", None)
    assert of_node.events > 24

    of_controller = replay_journal(controller.journal)
    assert (of_controller.core, of_controller.other) == ("controller", None)
    assert of_controller.requests is not None
    assert of_controller.requests.finished == of_controller.requests.requests == CLIENTS + 2
    assert of_controller.requests.output_tokens == (CLIENTS + 2) * 24
