"""Real processes: two controllers with one state, and a node that follows who leads."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import MeshError, StandsBy, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient
from tests.e2e.live_cell import WAIT_S_MAX, Answer, free_port, invoked
from tests.support.postgres_server import PostgresServer
from tests.support.tiny_model import write_tiny_llama

ANSWERS = 4
TOKENS = 120
NAME = DeploymentName("chat")


class Pair:
    """Two controllers and a node, in a folder."""

    def __init__(self, folder: Path, state: str) -> None:
        self._folder = folder
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.http = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self._stack = ExitStack()
        for n, at in enumerate(self.addresses):
            home = str(folder / f"c{n}")
            options = ("--listen", at, "--http", self.http[n], "--home", home)
            self._start("mesh", "controller", "--state", state, *options)
            self.answers(at, stands_by=n > 0)
        join = ",".join(self.addresses)
        node = ("--join", join, "--name", "n1", "--home", str(folder / "n1"))
        script = ("--step-s", "0.03", "--")
        self._start("tests.support.scripted_node", *script, *node, "--memory", "1GiB")

    def _start(self, *module: str) -> None:
        log = self._stack.enter_context((self._folder / "log").open("ab"))
        process = subprocess.Popen([sys.executable, "-m", *module], stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.processes = [*getattr(self, "processes", []), process]

    def answers(self, address: str, *, stands_by: bool = False) -> None:
        """Until that one leads, or stands by."""
        until_s = time.monotonic() + WAIT_S_MAX
        with MeshClient(address) as client:
            while True:
                assert time.monotonic() < until_s, (self._folder / "log").read_text()
                try:
                    client.status()
                except StandsBy:
                    if stands_by:
                        return
                except Unavailable:
                    pass
                else:
                    return
                time.sleep(0.05)

    def asked(self, n: int, path: str, **sent: Any) -> requests.Response:
        """The answer of a controller over HTTP, once it leads."""
        until_s = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                ask = requests.post if sent else requests.get
                told = ask(f"http://{self.http[n]}{path}", timeout=WAIT_S_MAX, **sent)
                if told.status_code == 200:
                    return told
            except requests.ConnectionError:
                pass
            assert time.monotonic() < until_s, (self._folder / "log").read_text()
            time.sleep(0.05)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def pair(server: PostgresServer, cell: str, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, server.url(cell))
    yield made
    made.close()


def step_down(pair: Pair) -> None:
    with MeshClient(pair.addresses[0]) as client:
        until_s = time.monotonic() + WAIT_S_MAX
        while True:  # the other one may stand by only now
            try:
                client.step_down()
            except MeshError:
                assert time.monotonic() < until_s
                time.sleep(0.05)
            else:
                return


@pytest.mark.parametrize("how", ["kill", "stop", "freeze", "step down"])
def test_open_answers_go_on_under_the_one_that_stood_by(
    pair: Pair, tmp_path: Path, how: str
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", seed=1)
    with MeshClient(pair.addresses[0]) as client, MeshClient(",".join(pair.addresses)) as both:
        until_s = time.monotonic() + WAIT_S_MAX
        while not client.nodes():
            assert time.monotonic() < until_s
            time.sleep(0.05)
        client.deploy(DeploymentSpec(name=NAME, source=f"file://{model}"))

        def ask() -> Answer:
            return invoked(both, NAME, "go on", max_tokens=TOKENS, temperature=1.0, seed=7)

        unbroken = ask()
        unbroken.finished()
        (instance,) = client.get(NAME).instances
        answers = [ask() for _ in range(ANSWERS)]
        until_s = time.monotonic() + WAIT_S_MAX
        while min(len(answer.token_ids) for answer in answers) < 3:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        match how:
            case "kill":
                pair.processes[0].kill()
            case "freeze":
                pair.processes[0].send_signal(signal.SIGSTOP)
            case "stop":
                pair.processes[0].send_signal(signal.SIGTERM)
            case _:
                step_down(pair)
        for answer in answers:
            answer.finished()
            assert (answer.token_ids, answer.text) == (unbroken.token_ids, unbroken.text)
        (same,) = both.get(NAME).instances
        assert same.instance_id == instance.instance_id, "nothing had to be loaded"
    pair.answers(pair.addresses[1])
    if how == "step down":
        assert pair.processes[0].poll() is None, "it stands by"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_batch_goes_on_under_the_one_that_stood_by(pair: Pair, tmp_path: Path, how: str) -> None:
    model = write_tiny_llama(tmp_path / "tiny", seed=1)
    with MeshClient(pair.addresses[0]) as client:
        until_s = time.monotonic() + WAIT_S_MAX
        while not client.nodes():
            assert time.monotonic() < until_s
            time.sleep(0.05)
        client.deploy(DeploymentSpec(name=NAME, source=f"file://{model}"))
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
    pair.processes[0].send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
    while (batch := pair.asked(1, path).json())["status"] != "completed":
        assert time.monotonic() < until_s + WAIT_S_MAX, batch
        time.sleep(0.05)
    assert batch["request_counts"] == {"total": len(names), "completed": len(names), "failed": 0}
    answers = pair.asked(1, f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in answers) == sorted(names)
    assert pair.asked(1, f"/v1/files/{file['id']}/content").text == content
