"""A deployment is changed under load, changed back, its node drained: nobody loses an answer."""

import threading
from pathlib import Path

import pytest

from bench.cells import wait_until
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.invocation import Finished, Invocation, TextPrompt
from mesh.domain.revision import RevisionState
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient
from tests.e2e.live_cell import WAIT_S_MAX, LiveCell
from tests.support.tiny_model import write_tiny_llama

CHAT = DeploymentName("chat")
CALLERS = 4
REQUESTS_MIN = 80
TOKENS = 8


class Load:
    """Callers that ask without a pause; they stop when the context is left."""

    def __init__(
        self, client: MeshClient, name: DeploymentName, *, callers: int, tokens: int
    ) -> None:
        self.finished = 0
        self.failed: list[MeshError] = []
        self._client = client
        self._asked = Invocation(
            deployment=name,
            prompt=TextPrompt(text="through it all"),
            max_tokens=tokens,
            ignore_eos=True,
        )
        self._tokens = tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                *_, last = self._client.invoke(self._asked)
                if not isinstance(last, Finished) or last.output_tokens != self._tokens:
                    raise MeshError(f"an answer ended as {last}")
            except MeshError as error:
                with self._lock:
                    self.failed.append(error)
            else:
                with self._lock:
                    self.finished += 1

    def until(self, finished: int, *, wait_s_max: float) -> None:
        """Wait until so many have their answers, or one has failed. Raises Unavailable."""
        wait_until(
            lambda: self.finished >= finished or bool(self.failed),
            f"not {finished} answers",
            wait_s_max,
        )


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("other") / "tiny", seed=2)


def spec(source: Path, *, replicas_max: int = Scaling().replicas_max) -> DeploymentSpec:
    return DeploymentSpec(
        name=CHAT,
        source=f"file://{source}",
        slo=Slo(ttft_s=20.0, tpot_s=5.0),
        scaling=Scaling(replicas_min=1, replicas_max=replicas_max, keep_alive_s=60.0),
    )


def serves(cell: LiveCell, number: int) -> bool:
    """Whether this revision alone does."""
    found = cell.deployment(CHAT)
    states = [view.state for view in found.revisions] if found is not None else []
    quiet = RevisionState.RETIRING not in states and RevisionState.STARTING not in states
    return found is not None and found.revision == number and quiet


def more(load: Load, requests: int) -> None:
    load.until(load.finished + requests, wait_s_max=WAIT_S_MAX)


def test_update_undo_and_drain_under_load_lose_no_request(
    cell: LiveCell, tiny_model: Path, other_model: Path
) -> None:
    cell.start("n1", "--step-s", "0.005", "--load-s", "0.2")
    cell.start_node("n2", "--step-s", "0.005", "--load-s", "0.2")
    cell.client.deploy(spec(tiny_model))
    cell.wait_for("an instance", lambda: cell.instance_count(CHAT) == 1)
    with Load(cell.client, CHAT, callers=CALLERS, tokens=TOKENS) as load:
        more(load, 10)
        assert cell.client.deploy(spec(other_model)).text == "revision 2 starts"
        cell.wait_for("the update", lambda: serves(cell, 2))
        more(load, 10)
        assert cell.client.undo(CHAT) == "revision 3 starts"
        cell.wait_for("the way back", lambda: serves(cell, 3))
        more(load, 10)
        (instance,) = cell.client.get(CHAT).instances
        cell.client.drain(NodeId(instance.node_id))
        cell.wait_for(
            "the drained node to be empty",
            lambda: (n := cell.node(instance.node_id)) is not None and not n.instances,
        )
        more(load, max(REQUESTS_MIN - load.finished, 10))
    assert load.failed == []
    assert load.finished >= REQUESTS_MIN
    assert cell.client.get(CHAT).served == load.finished


def test_an_update_that_cannot_load_leaves_the_old_revision_serving(
    cell: LiveCell, tiny_model: Path, other_model: Path
) -> None:
    cell.start("n1", "--step-s", "0.02")
    cell.client.deploy(spec(tiny_model, replicas_max=1))
    cell.wait_for("an instance", lambda: cell.instance_count(CHAT) == 1)
    cell.start_node("n2", "--fail-loads")
    running = cell.invoke(CHAT, "all the while", max_tokens=200)
    cell.wait_tokens(running, 1)
    cell.client.drain(NodeId("n1"))  # the new revision finds a node that cannot load
    cell.client.deploy(spec(other_model, replicas_max=1))

    def failed() -> str:
        views = {v.number: v for v in cell.client.get(CHAT).revisions}
        return views[2].message if views[2].state is RevisionState.FAILED else ""

    assert "the script wants it so" in cell.wait_for("the update to fail", failed)
    cell.client.drain(NodeId("n1"), undo=True)
    assert running.finished().output_tokens == 200
    assert cell.client.get(CHAT).revision == 1
    assert cell.invoke(CHAT, "still here", max_tokens=5).finished().output_tokens == 5


def test_a_rollout_and_its_revisions_survive_kills_of_the_controller(
    cell: LiveCell, tiny_model: Path, other_model: Path
) -> None:
    """One amid the rollout, which goes on, and one after it."""
    cell.start_controller()
    node = cell.start_node("n1", "--load-s", "1.0")
    cell.client.deploy(spec(tiny_model))
    cell.wait_for("an instance", lambda: cell.instance_count(CHAT) == 1)
    assert cell.client.deploy(spec(other_model)).text == "revision 2 starts"
    assert cell.client.get(CHAT).revision == 1
    cell.controller.kill()
    cell.start_controller()
    assert cell.client.get(CHAT).revision == 1, "the old one serves till then"
    cell.wait_for("the update", lambda: serves(cell, 2))
    assert cell.invoke(CHAT, "and on", max_tokens=5).finished().output_tokens == 5
    cell.controller.kill()
    cell.start_controller()
    cell.wait_for("the node", lambda: cell.node("n1"))
    found = cell.client.get(CHAT)
    assert (found.revision, found.spec.source) == (2, f"file://{other_model}")
    assert [view.number for view in found.revisions] == [1, 2]
    assert cell.client.undo(CHAT) == "revision 3 starts"
    cell.wait_for("the way back", lambda: serves(cell, 3))
    assert cell.client.get(CHAT).spec.source == f"file://{tiny_model}"
    assert node.popen.poll() is None
