"""The controller dies and comes back: what it acknowledged is there, and nodes find it again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Accepted
from mesh.domain.usage import UsageBy
from tests.e2e.live_cell import WAIT_S_MAX, LiveCell, Process

STEP_S = 0.1


@pytest.mark.parametrize("end", [Process.kill, Process.terminate])
def test_open_answers_go_on_under_the_next_controller_as_if_nothing_had_been(
    cell: LiveCell, tiny_model: Path, end: Callable[[Process], object]
) -> None:
    controller = cell.start_controller()
    cell.start_node("n1", "--step-s", "0.03")
    cell.deploy("chat", tiny_model)
    unbroken = cell.invoke("chat", "go on", max_tokens=60, temperature=1.0, seed=7)
    unbroken.finished()
    (instance,) = cell.client.get(DeploymentName("chat")).instances
    answers = [
        cell.invoke("chat", "go on", max_tokens=60, temperature=1.0, seed=7) for _ in range(3)
    ]
    for n, answer in enumerate(answers):
        cell.wait_tokens(answer, 3 + 4 * n)
    end(controller)
    cell.start_controller()
    for answer in answers:
        finished = answer.finished()
        assert (answer.token_ids, answer.text) == (unbroken.token_ids, unbroken.text)
        assert sum(isinstance(event, Accepted) for event in answer.events) == 1
        assert finished.ttft_s > 0.0
    after = cell.invoke("chat", "go on", max_tokens=60, temperature=1.0, seed=7)
    assert after.finished().grace_s == 0.0, "nothing had to be loaded"
    assert after.token_ids == unbroken.token_ids
    (same,) = cell.client.get(DeploymentName("chat")).instances
    assert same.instance_id == instance.instance_id
    cell.wait_for("nothing to run", lambda: cell.client.status().running == 0)


def test_answers_end_within_the_grace_of_a_controller_that_is_stopped(
    cell: LiveCell, tiny_model: Path
) -> None:
    controller = cell.start_controller("--grace-s", "50")
    cell.start_node("n1", "--step-s", "0.02")
    cell.deploy("chat", tiny_model)
    answer = cell.invoke("chat", "let me end", max_tokens=60)
    cell.wait_tokens(answer, 3)
    assert controller.terminate() == 0
    assert answer.finished().output_tokens == 60
    assert answer.finished().ttft_s > 0.0


def test_a_client_whose_controller_stays_away_is_told_so_and_the_node_drops_its_request(
    cell: LiveCell, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", 0.5)
    controller = cell.start_controller()
    cell.start_node("n1", "--step-s", str(STEP_S))
    cell.deploy("chat", tiny_model)
    answer = cell.invoke("chat", "cut off", max_tokens=400)
    cell.wait_tokens(answer, 3)
    controller.kill()
    assert answer.ended.wait(WAIT_S_MAX)
    with pytest.raises(Unavailable, match="went away while it answered"):
        answer.finished()
    cell.start_controller("--adopted-s", "0.5")
    cell.wait_for("the node to come back", lambda: cell.node("n1"))
    cell.wait_for(
        "the abandoned request to be off its batch, before it would end by itself",
        lambda: [i.batch for i in cell.client.get(DeploymentName("chat")).instances] == [0],
        200 * STEP_S,
    )
    status = cell.client.status()
    assert (status.running, status.queued) == (0, 0)


def test_what_clients_used_is_on_the_books_after_a_kill(
    cell: LiveCell, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", 0.1)
    controller = cell.start_controller()
    cell.start_node("n1", "--step-s", "0.002")
    cell.deploy("chat", tiny_model)
    ended, last = [], None
    for n in range(12):
        last = cell.invoke("chat", f"question {n}", max_tokens=5 + n)
        if n < 11:
            ended.append(last.finished())
    controller.kill()
    assert last is not None
    assert last.ended.wait(WAIT_S_MAX)
    if last.error is None:
        ended.append(last.finished())
    cell.start_controller()
    (used,) = cell.client.usage(by=UsageBy.DEPLOYMENT)
    assert (used.deployment, used.refused) == ("chat", 0)
    assert used.requests in (len(ended), len(ended) + 1), "one may have ended and not been told"
    if used.requests == len(ended):
        assert used.output_tokens == sum(one.output_tokens for one in ended)
        assert used.prompt_tokens == sum(one.prompt_tokens for one in ended)


def test_a_node_waits_for_its_controller_with_few_words(cell: LiveCell) -> None:
    node = cell.start_node("early", join=False)
    cell.wait_for("the node to say that it waits", lambda: "no link" in node.log_text())
    cell.start_controller()
    cell.wait_for("the node to join", lambda: cell.node("early"))
    cell.wait_for("the node to say that it joined", lambda: "joined" in node.log_text())
    assert len(node.log_text().splitlines()) <= 3, node.log_text()
