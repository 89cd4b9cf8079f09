"""From zero and back to zero, and deletes amid requests."""

from pathlib import Path

import pytest

from mesh.domain.errors import NotFound, Refused
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Waiting
from mesh.domain.reasons import RefusalReason
from tests.e2e.live_cell import WAIT_S_MAX, LiveCell


def test_an_idle_deployment_goes_to_zero_and_comes_back(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("n1", "--load-s", "0.2")
    cell.deploy("chat", tiny_model, keep_alive_s=0.3)
    assert cell.instance_count("chat") == 0, "deploying loads nothing"
    for _ in range(2):
        answer = cell.invoke("chat", "from zero", max_tokens=5)
        assert answer.finished().grace_s == 0.0, "it is in time by the load"
        assert any(isinstance(event, Waiting) for event in answer.events), (
            "it says what it waits for"
        )
        cell.wait_for("the idle instance to go", lambda: cell.instance_count("chat") == 0)

    def is_free() -> bool:
        node = cell.node("n1")
        return node is not None and node.promised_bytes == node.tracked_bytes == 0

    cell.wait_for("its memory to be free, if it was loaded ahead again", is_free)


def test_a_delete_amid_requests_ends_them_with_it(cell: LiveCell, tiny_model: Path) -> None:
    cell.start("n1", "--step-s", "0.03")
    cell.deploy("chat", tiny_model)
    cell.deploy("other", tiny_model)
    running = cell.invoke("chat", "deleted amid this", max_tokens=400)
    neighbour = cell.invoke("other", "goes on", max_tokens=30)
    cell.wait_tokens(running, 3)
    assert cell.client.delete(DeploymentName("chat")) == "deleted"
    assert running.ended.wait(WAIT_S_MAX)
    with pytest.raises(Refused) as raised:
        running.finished()
    assert raised.value.reason is RefusalReason.DEPLOYMENT_DELETED
    with pytest.raises(NotFound):
        cell.client.get(DeploymentName("chat"))
    assert neighbour.finished().output_tokens == 30

    def only_other_is_left() -> bool:
        node = cell.node("n1")
        return node is not None and [i.deployment for i in node.instances] == ["other"]

    cell.wait_for("the deleted instance to go", only_other_is_left)
