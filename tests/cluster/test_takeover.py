"""Real processes: two controllers with one state, a node that follows who leads, and a front."""

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests

from mesh.controller.lease import LEASE_S
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError, StandsBy, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import DeploymentState
from mesh.wire.client import MeshClient
from tests.cluster.test_postgres import asked
from tests.e2e.live_cell import WAIT_S_MAX, Answer, free_port, invoked
from tests.support.postgres_server import PostgresServer
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import as_long_s, until

ANSWERS = 8
"""Half of them by a front."""
TOKENS = 120
NAME = DeploymentName("chat")
SILENCE_S_MAX = {"kill": 2.0}
"""From one token of an answer to the next over the loss of its controller, by how that is lost."""
OTHERS_S_MAX = 3.0
CALLERS = 8
LOAD_S = 30.0
REFUSED_S_MAX = 1.0

log = logging.getLogger(__name__)


class Cell:
    """Two controllers, a node and a front, in a folder; the first controller leads."""

    def __init__(self, folder: Path, state: str) -> None:
        self._folder, self.state = folder, state
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.http = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.front = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        for n in range(2):
            self.start(n)
        both = ",".join(self.addresses)
        node = ("--join", both, "--name", "n1", "--home", str(folder / "n1"))
        script = ("--step-s", "0.03", "--")
        self._start("node", "tests.support.scripted_node", *script, *node, "--memory", "1GiB")
        front = ("--listen", self.front, "--home", str(folder / "front"))
        self._start("front", "mesh", "front", "--cells", f"a={both}", *front)
        self.answers(self.front)

    def start(self, n: int) -> None:
        """That controller, until it leads or stands by."""
        at, home = self.addresses[n], str(self._folder / f"c{n}")
        options = ("--listen", at, "--http", self.http[n], "--home", home)
        self._start(f"c{n}", "mesh", "controller", "--state", self.state, *options)
        self.answers(at, stands_by=True)

    def stop(self, n: int) -> None:
        self.processes[f"c{n}"].send_signal(signal.SIGTERM)
        self.processes[f"c{n}"].wait(WAIT_S_MAX)

    def _start(self, name: str, *module: str) -> None:
        output = self._stack.enter_context((self._folder / "log").open("ab"))
        process = subprocess.Popen([sys.executable, "-m", *module], stdout=output, stderr=output)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.processes[name] = process

    def answers(self, address: str, *, stands_by: bool = False) -> None:
        """Until that one leads, or stands by."""

        def does() -> bool:
            try:
                client.status()
            except StandsBy:
                return stands_by
            except Unavailable:
                return False
            return True

        with MeshClient(address) as client:
            until(does, WAIT_S_MAX, poll_s=0.05)

    def asked(self, n: int, path: str, **sent: Any) -> requests.Response:
        """The answer of a controller over HTTP, once it leads."""
        told: list[requests.Response] = []

        def answers() -> bool:
            ask = requests.post if sent else requests.get
            try:
                told.append(ask(f"http://{self.http[n]}{path}", timeout=WAIT_S_MAX, **sent))
            except requests.ConnectionError:
                return False
            return told[-1].status_code == 200

        until(answers, WAIT_S_MAX, poll_s=0.05)
        return told[-1]

    def deploy(self, folder: Path) -> None:
        model = write_tiny_llama(folder / "tiny", seed=1)
        with MeshClient(self.addresses[0]) as client, MeshClient(self.front) as front:
            until(lambda: bool(client.nodes()))
            client.deploy(DeploymentSpec(name=NAME, source=f"file://{model}"))
            until(lambda: any(one.state is DeploymentState.READY for one in front.list()))

    def kept(self) -> object:
        """Who has the lease, of which epoch, and what is deployed, as the database says."""
        names = "(SELECT string_agg(name, ',') FROM deployments)"
        return asyncio.run(asked(self.state, f"SELECT concat(epoch, holder, {names}) FROM lease"))

    def breaks(self) -> int:
        """How often the node's link has broken."""
        lines = (self._folder / "log").read_text().splitlines()
        return sum("link to " in line and " broke: " in line for line in lines)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def pair(server: PostgresServer, cell: str, tmp_path: Path) -> Iterator[Cell]:
    made = Cell(tmp_path, server.url(cell))
    yield made
    made.close()


def step_down(pair: Cell) -> None:
    def does() -> bool:
        try:
            client.step_down()
        except MeshError:  # the other one may stand by only now
            return False
        return True

    with MeshClient(pair.addresses[0]) as client:
        until(does, WAIT_S_MAX, poll_s=0.05)


class Answers:
    """Open answers, half of them by the front, each of which has begun."""

    def __init__(self, asks: list[Callable[[], Answer]], unbroken: Answer) -> None:
        self._open = [asks[n % len(asks)]() for n in range(ANSWERS)]
        self._unbroken = unbroken
        until(lambda: all(len(answer.token_ids) >= 3 for answer in self._open))
        self._since_s = time.monotonic()

    def end(self) -> float:
        """The longest time without a token since they had begun. Their text is as that of the one
        that nothing has broken.
        """
        silences_s = []
        for answer in self._open:
            answer.finished()
            assert (answer.token_ids, answer.text) == (
                self._unbroken.token_ids,
                self._unbroken.text,
            )
            arrivals_s = [*pairwise(answer.arrivals_s)]
            silences_s += [b - a for a, b in arrivals_s if b > self._since_s]
        return max(silences_s)


@pytest.mark.parametrize("how", ["kill", "stop", "freeze", "step down"])
def test_open_answers_go_on_under_the_one_that_stood_by(
    pair: Cell, tmp_path: Path, how: str
) -> None:
    pair.deploy(tmp_path)
    leader = pair.processes["c0"]
    with MeshClient(",".join(pair.addresses)) as both, MeshClient(pair.front) as front:
        asks = asking(both, front)
        unbroken = asks[0]()
        unbroken.finished()
        (instance,) = both.get(NAME).instances
        answers = Answers(asks, unbroken)
        match how:
            case "kill":
                leader.kill()
            case "freeze":
                leader.send_signal(signal.SIGSTOP)
            case "stop":
                leader.send_signal(signal.SIGTERM)
            case _:
                step_down(pair)
        silence_s = answers.end()
        log.info("%s: no token for %.2f s", how, silence_s)
        assert silence_s <= as_long_s(SILENCE_S_MAX.get(how, OTHERS_S_MAX))
        (same,) = both.get(NAME).instances
        assert same.instance_id == instance.instance_id, "nothing had to be loaded"
        pair.answers(pair.addresses[1])
        if how == "step down":
            assert leader.poll() is None, "it stands by"
        if how != "freeze":
            return
        kept, breaks, answers = pair.kept(), pair.breaks(), Answers(asks, unbroken)
        leader.send_signal(signal.SIGCONT)
        with MeshClient(pair.addresses[0]) as thawed, pytest.raises(MeshError):
            thawed.delete(NAME)
        assert leader.wait(WAIT_S_MAX) != 0, "it says that another one leads"
        answers.end()
        (same,) = both.get(NAME).instances
        assert same.instance_id == instance.instance_id
        assert (pair.kept(), pair.breaks()) == (kept, breaks), "it wrote nothing, and had no node"


def asking(*clients: MeshClient) -> list[Callable[[], Answer]]:
    ask = partial(invoked, name=NAME, prompt="go on", max_tokens=TOKENS, temperature=1.0, seed=7)
    return [partial(ask, client) for client in clients]


def test_no_call_fails_while_both_controllers_are_restarted_in_turn(
    pair: Cell, tmp_path: Path
) -> None:
    pair.deploy(tmp_path)
    stop, failed, served = threading.Event(), [], []

    def call(address: str) -> None:
        with MeshClient(address) as client:
            while not stop.is_set():
                answer = invoked(client, NAME, "go on", max_tokens=5)
                try:
                    answer.finished()
                except (MeshError, AssertionError) as error:
                    failed.append(error)
                else:
                    served.append(address)

    places = (",".join(pair.addresses), pair.front)
    callers = [threading.Thread(target=call, args=(places[n % 2],)) for n in range(CALLERS)]
    for caller in callers:
        caller.start()
    began_s, restarts = time.monotonic(), 0
    try:
        while restarts < 2 or time.monotonic() - began_s < LOAD_S:
            pair.stop(restarts % 2)
            pair.start(restarts % 2)
            restarts += 1
    finally:
        stop.set()
        for caller in callers:
            caller.join(WAIT_S_MAX)
    assert not any(caller.is_alive() for caller in callers), "a call hangs"
    log.info("%d calls over %d restarts", len(served), restarts)
    assert not failed
    assert set(served) == set(places)


def test_calls_are_served_while_the_database_is_away_and_what_changes_a_deployment_is_refused(
    server: PostgresServer, pair: Cell, tmp_path: Path
) -> None:
    pair.deploy(tmp_path)
    with MeshClient(",".join(pair.addresses)) as both, MeshClient(pair.front) as front:
        asks = asking(both, front)
        unbroken = asks[0]()
        unbroken.finished()
        answers, kept, breaks = Answers(asks, unbroken), pair.kept(), pair.breaks()
        server.stop()
        try:
            time.sleep(2 * LEASE_S)
            begun_s = time.monotonic()
            with pytest.raises(MeshError, match="takes no writes of this controller now"):
                both.deploy(DeploymentSpec(name=DeploymentName("more"), source="file:///nowhere"))
            assert time.monotonic() - begun_s <= as_long_s(REFUSED_S_MAX)
            Answers(asks, unbroken).end()
            answers.end()
        finally:
            server.start()

        def is_scaled() -> bool:
            try:
                both.scale(NAME, replicas_max=2)
            except MeshError:
                return False
            return True

        until(is_scaled)
        assert (pair.kept(), pair.breaks()) == (kept, breaks), "nobody else has led"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_batch_goes_on_under_the_one_that_stood_by(pair: Cell, tmp_path: Path, how: str) -> None:
    pair.deploy(tmp_path)
    until_s = time.monotonic() + WAIT_S_MAX
    url, body = "/v1/completions", {"model": NAME, "prompt": "go on", "max_tokens": 30}
    names = [f"c{n}" for n in range(150)]
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name in names]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    form = {"data": {"purpose": "batch"}, "files": {"file": ("calls.jsonl", content)}}
    file = pair.asked(0, "/v1/files", **form).json()
    asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    path = f"/v1/batches/{pair.asked(0, '/v1/batches', json=asked).json()['id']}"
    while (before := pair.asked(0, path).json()["request_counts"]["completed"]) < 10:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert before < len(names)
    pair.processes["c0"].send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
    while (batch := pair.asked(1, path).json())["status"] != "completed":
        assert time.monotonic() < until_s + WAIT_S_MAX, batch
        time.sleep(0.05)
    assert batch["request_counts"] == {"total": len(names), "completed": len(names), "failed": 0}
    answers = pair.asked(1, f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in answers) == sorted(names)
    assert pair.asked(1, f"/v1/files/{file['id']}/content").text == content
