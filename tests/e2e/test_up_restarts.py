"""`mesh up` goes on when its children are killed under load, and so do the requests of others.

Two nodes with the real engine, each with a deployment of its own (`sllm+cpu`: an instance a node),
and clients that ask for as long as the test lasts. In a run of all tests a node and the controller
are killed once; `MESH_UP_KILLS=20` kills each child twenty times.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mesh.cli.restarts import RestartLimits
from mesh.domain.errors import Refused, Unavailable
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import Slo
from tests.cli.running import mesh_process
from tests.e2e.live_cell import SETTLED, Answer, LiveCell

KILLS = int(os.environ.get("MESH_UP_KILLS", "1"))
NODES = ("node cpu0", "node cpu1")
DEPLOYMENTS = ("chat", "code")
CLIENTS = 2
"""This many clients call each deployment, and each of them has a request under way."""
TOKENS = 400
PAUSE_S = 1.0
"""So long clients pause while a child comes back: else it waits for them, and they compute."""
BACK_S_MAX = 60.0
TEST_S_MAX = 120.0 + KILLS * 60.0
# What is killed and comes back is slow; nothing is to be refused for that.
SLO = Slo(ttft_s=300.0, tpot_s=30.0)


class Load:
    """Clients that ask one request after the other, and what became of each."""

    def __init__(self, cell: LiveCell) -> None:
        self._cell = cell
        self._stopping = threading.Event()
        self.pause_s = 0.0
        """Between two requests of a client."""
        self.under_way: dict[str, Answer] = {}
        self.ended: list[Answer] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(name, f"{name} {number}"))
            for name in DEPLOYMENTS
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str, prompt: str) -> None:
        while not self._stopping.is_set():
            answer = self._cell.invoke(name, prompt, max_tokens=TOKENS)
            self.under_way[prompt] = answer
            answer.ended.wait()
            self.ended.append(answer)
            self._stopping.wait(0.1 if answer.error is not None else self.pause_s)

    def of(self, name: str) -> list[Answer]:
        """The requests that are under way now and have tokens."""
        answers = [answer for prompt, answer in self.under_way.items() if prompt.startswith(name)]
        return [a for a in answers if a.token_ids and not a.ended.is_set()]

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(BACK_S_MAX)
            assert not thread.is_alive(), "a request has no end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    pid: int
    err: Path

    def kill(self, name: str) -> None:
        """SIGKILL, for one that the terminal calls by this name."""
        marks = {"mesh.controller"} if name == "the controller" else {"mesh_nodes", name.split()[1]}
        own = psutil.Process(self.pid).children()
        (found,) = [child for child in own if marks <= set(child.cmdline())]
        found.send_signal(signal.SIGKILL)

    def said(self, line: str) -> int:
        return self.err.read_text().splitlines().count(line)


@pytest.fixture
def up(cell: LiveCell, tmp_path: Path, tiny_model: Path) -> Iterator[Up]:
    err = tmp_path / "err"
    arguments = [
        *("up", "--node", "cpu", "--node", "cpu", "--policy", "sllm+cpu"),
        *("--listen", cell.address, "--http", "off", "--home", str(tmp_path / "home")),
        *("--memory", "288MiB", "--threads", "1", *SETTLED),
    ]
    with mesh_process(*arguments, environ=os.environ, err=err) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith("next")), "")
        assert said, err.read_text()
        for name in DEPLOYMENTS:
            cell.deploy(name, tiny_model, replicas_max=1, slo=SLO)
        yield Up(pid=process.pid, err=err)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=BACK_S_MAX) == 0
    assert err.read_text().endswith("stopping\n")


def busy(cell: LiveCell, load: Load) -> dict[str, list[Answer]]:
    """The requests under way on each node, once every client of both has one; else nothing."""
    at: dict[str, list[Answer]] = {}
    for name in DEPLOYMENTS:
        found, answers = cell.deployment(name), load.of(name)
        if found is None or len(answers) < CLIENTS:
            return {}
        at |= {f"node {instance.node_id}": answers for instance in found.instances}
    return at if tuple(sorted(at)) == NODES else {}


@pytest.mark.timeout(TEST_S_MAX)
def test_killed_children_come_back_and_others_lose_no_request(cell: LiveCell, up: Up) -> None:
    load = Load(cell)
    try:
        for kill in range(1, KILLS + 1):
            for name in (*(NODES if KILLS > 1 else NODES[:1]), "the controller"):
                one_is_killed(cell, load, up, name, kill)
            if RestartLimits().in_a_row_max < KILLS:
                time.sleep(RestartLimits().well_s)
        load.pause_s = 0.0
        cell.wait_for("both nodes to serve", lambda: busy(cell, load), BACK_S_MAX)
    finally:
        load.stop()
    children = psutil.Process(up.pid).children()
    assert len(children) == 1 + len(NODES)
    assert all(child.status() != psutil.STATUS_ZOMBIE for child in children)


def one_is_killed(cell: LiveCell, load: Load, up: Up, name: str, kill: int) -> None:
    """Kill a child amid requests, and wait until it is back."""
    load.pause_s = 0.0
    at = cell.wait_for("both nodes to be busy", lambda: busy(cell, load), BACK_S_MAX)
    ended_before = len(load.ended)
    up.kill(name)
    load.pause_s = PAUSE_S
    cell.wait_for(f"{name} to be back", lambda: up.said(f"{name} is back") == kill, BACK_S_MAX)
    if name != "the controller":
        (others,) = (answers for node, answers in at.items() if node != name)
        for answer in others:
            assert f"node {answer.finished().node_id}" != name
    lost = RefusalReason.NO_NODE if name == "the controller" else RefusalReason.NODE_LOST
    for answer in load.ended[ended_before:]:
        match answer.error:
            case None:
                assert answer.finished().output_tokens == TOKENS
            case Unavailable():
                assert name == "the controller", answer.error
            case Refused(reason=reason):
                assert reason is lost, answer.error
            case _:
                raise answer.error
