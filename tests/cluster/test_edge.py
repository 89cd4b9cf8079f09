"""The Envoy of `deploy/kubernetes/edge`, before real servers: TLS, health, retries, time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import requests
import yaml

from mesh.controller.keys import KeyBook
from mesh.domain.access import NOBODY, Role
from mesh.domain.deployment import DeploymentSpec
from mesh.domain.errors import Refused, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Finished, Invocation, TextPrompt
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.reasons import RefusalReason
from mesh.domain.slo import Slo
from mesh.domain.values import replace
from mesh.wire.certificates import Part, make_folder, read_tls
from mesh.wire.channel import dial_blocking
from mesh.wire.client import MeshClient
from mesh.wire.credentials import Credentials, show
from mesh.wire.leader import Look, look_blocking
from tests.e2e.live_cell import WAIT_S_MAX, free_port, invoked
from tests.support.depth import DEEP
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import as_long_s

CONFIG = Path(__file__).parents[2] / "deploy" / "kubernetes" / "edge" / "envoy.yaml"
ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent))
NAME = DeploymentName("chat")
ASKED = Invocation(deployment=NAME, prompt=TextPrompt(text="go on"))
NEW_CALLS = 50
CALLERS, CALLS = 8, 1_000 if DEEP else 50
PATIENT = Slo(ttft_s=WAIT_S_MAX, tpot_s=2.0)
"""An SLO that answers in steps of 0.2 s keep, and calls beside them, too."""
pytestmark = [
    pytest.mark.skipif(ENVOY is None, reason="no Envoy here: `make test-cluster` has one"),
    pytest.mark.timeout(240),
]


def edge_config(
    folder: Path,
    ports: list[tuple[int, int]],
    listens: tuple[int, int],
    admin: int,
    looks: Mapping[str, str],
) -> Path:
    """The file as it is, but for where it listens, where the controllers are, its files, that Envoy
    tells at `admin` which of them it calls, and how it looks for their health: it waits longer for
    their word, since a busy machine may keep one from answering for seconds, and then no controller
    were left, and then as `looks` has it.
    """
    text = CONFIG.read_text().replace("/etc/mesh/edge", str(folder / "edge"))
    config: dict[str, Any] = yaml.safe_load(text.replace("/etc/mesh/client", str(folder / "tls")))
    for number, listener in enumerate(config["static_resources"]["listeners"]):
        at = listener["address"]["socket_address"]
        at["address"], at["port_value"] = "127.0.0.1", listens[number]
    for number, cluster in enumerate(config["static_resources"]["clusters"]):
        (group,) = cluster["load_assignment"]["endpoints"]
        at_each = [{"address": "127.0.0.1", "port_value": port[number]} for port in ports]
        group["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": at}}} for at in at_each
        ]
        for check in cluster["health_checks"]:
            check |= {"timeout": f"{WAIT_S_MAX:g}s", **looks}
    config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}}
    written = folder / "envoy.yaml"
    written.write_text(yaml.safe_dump(config))
    return written


class Edge:
    """Controllers and an Envoy before them, or before so many `fronts` of theirs. Each controller
    has a node of its own, unless they have a `state` in common: then one node follows who leads.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        state: str = "",
        step_s: float = 0.02,
        fronts: int = 0,
        **looks: str,
    ) -> None:
        self.folder = folder
        make_folder(folder / "tls", ("localhost", "127.0.0.1", "mesh-controllers"), 1)
        (folder / "edge").mkdir()
        for name, of in (("tls.crt", "controller.pem"), ("tls.key", "controller.key")):
            shutil.copy(folder / "tls" / of, folder / "edge" / name)
        book = KeyBook(folder / "c0" / "controller")
        self._admin, node_key = (book.create(r, NOBODY)[0] for r in (Role.ADMIN, Role.NODE))
        book.close()
        for n in range(1, count):
            shutil.copytree(folder / "c0", folder / f"c{n}")
        show(Credentials(key=self._admin, tls=read_tls(folder / "tls", Part.CLIENT)))
        self._stack = ExitStack()
        self.controllers: list[subprocess.Popen[bytes]] = []
        self._commands: list[tuple[str, ...]] = []
        self._closed = Event()
        self._restarts = Thread(target=self._restart)
        ports = [(free_port(), free_port()) for _ in range(count)]
        self.addresses = [f"127.0.0.1:{grpc}" for grpc, _ in ports]
        tls = ("--tls", str(folder / "tls"))
        for n, (grpc, http) in enumerate(ports):
            at = ("--listen", f"127.0.0.1:{grpc}", "--http", f"127.0.0.1:{http}")
            own = ("--state", state) if state else ()
            home = ("--home", str(folder / f"c{n}"))
            module = ("-m", "mesh", "controller")
            command = (sys.executable, *module, *at, *home, *own, *tls, "--keys")
            self._commands.append(command)
            self.controllers.append(self._start(*command))
        self.nodes: list[subprocess.Popen[bytes]] = []
        joins = [",".join(self.addresses)] if state else self.addresses
        for n, join in enumerate(joins):
            node = ("--join", join, "--name", f"n{n}", "--home", str(folder / f"n{n}"))
            script = ("-m", "tests.support.scripted_node", "--step-s", str(step_s), "--")
            started = (*script, *node, *tls, "--memory", "1GiB")
            self.nodes.append(self._start(sys.executable, *started, key=node_key))
        cell = ("--cells", f"cell={','.join(self.addresses)}", "--grace-s", str(WAIT_S_MAX))
        ports = [(free_port(), free_port()) for _ in range(fronts)] or ports
        self.fronts: list[subprocess.Popen[bytes]] = []
        self.front_addresses = [f"127.0.0.1:{grpc}" for grpc, _ in ports[:fronts]]
        for n, (grpc, http) in enumerate(ports[:fronts]):
            shutil.copytree(folder / "c0", folder / f"f{n}")
            at = ("--listen", f"127.0.0.1:{grpc}", "--http", f"127.0.0.1:{http}")
            home = ("--home", str(folder / f"f{n}"))
            front = (sys.executable, "-m", "mesh", "front", *cell, *at, *home, *tls, "--keys")
            self.fronts.append(self._start(*front, key=self._admin))
        self._serving = 1 if state else len(ports)
        """So many of those behind Envoy take calls."""
        self.grpc, self.http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        listens = int(self.grpc.rpartition(":")[2]), int(self.http.rpartition(":")[2])
        self._envoy = free_port()
        config = edge_config(folder, ports, listens, self._envoy, looks)
        assert ENVOY is not None
        self._start(ENVOY, "--disable-hot-restart", "-c", str(config), "-l", "warning")
        self._restarts.start()

    def _start(self, *command: str, key: str = "") -> "subprocess.Popen[bytes]":
        log = self._stack.enter_context((self.folder / "log").open("ab"))
        shown = {**os.environ, "MESH_KEY": key}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=shown)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _restart(self) -> None:
        """As systemd does: on a busy machine a leader may lose its lease, and ends. Those that a
        test has killed stay so.
        """
        while not self._closed.wait(0.2):
            for n, command in enumerate(self._commands):
                if self.controllers[n].poll() not in (None, -signal.SIGKILL):
                    self.controllers[n] = self._start(*command)

    def until(self, ready: Callable[[], object]) -> None:
        """Wait for it, which is not so while nobody answers."""
        until_s, last = time.monotonic() + WAIT_S_MAX, Exception()
        while True:
            try:
                if ready():
                    return
            except (Unavailable, OSError) as error:
                last = error
            assert time.monotonic() < until_s, f"{last} {(self.folder / 'log').read_text()[-4000:]}"
            time.sleep(0.1)

    def leads_to(self, count: int) -> bool:
        """Whether Envoy calls so many, by gRPC and by HTTP, which it checks apart."""
        return self._told("clusters").count("::health_flags::healthy") == 2 * count

    def retries(self) -> int:
        """How often Envoy has asked again, by gRPC and by HTTP."""
        told = self._told("stats?filter=^cluster.(grpc|http).upstream_rq_retry$")
        return sum(int(line.rpartition(" ")[2]) for line in told.splitlines())

    def _told(self, what: str) -> str:
        return requests.get(f"http://127.0.0.1:{self._envoy}/{what}", timeout=WAIT_S_MAX).text

    def deploy(self, *addresses: str, slo: Slo | None = None) -> None:
        """At these addresses, once there is a node, and until Envoy calls all that serve."""
        model = write_tiny_llama(self.folder / "tiny", seed=1)
        for address in addresses:
            with MeshClient(address) as client:
                self.until(client.nodes)
                client.deploy(DeploymentSpec(name=NAME, source=f"file://{model}", slo=slo or Slo()))
        self.until(lambda: self.leads_to(self._serving))

    def get(self, path: str) -> str:
        return self._asked("GET", path).text

    def complete(self, **asked: Any) -> str:
        """What comes of a completion, as a stream."""
        body = {"model": NAME, "prompt": "go on", "stream": True, **asked}
        return self._asked("POST", "/v1/completions", json=body).text

    def _asked(self, method: str, path: str, **body: Any) -> requests.Response:
        shown = {"authorization": f"Bearer {self._admin}"}
        authority = str(self.folder / "tls" / "ca.pem")
        how = {"headers": shown, "verify": authority, "timeout": WAIT_S_MAX, **body}
        got = requests.request(method, f"https://{self.http}{path}", **how)
        got.raise_for_status()
        return got

    def close(self) -> None:
        self._closed.set()
        self._restarts.join()
        self._stack.close()


def test_envoy_takes_the_file_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path
    make_folder(folder / "tls", ("localhost",), 1)
    (folder / "edge").mkdir()
    for name, of in (("tls.crt", "controller.pem"), ("tls.key", "controller.key")):
        shutil.copy(folder / "tls" / of, folder / "edge" / name)
    text = CONFIG.read_text().replace("/etc/mesh/edge", str(folder / "edge"))
    (folder / "envoy.yaml").write_text(text.replace("/etc/mesh/client", str(folder / "tls")))
    command = [str(ENVOY), "--mode", "validate", "-c", str(folder / "envoy.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_new_calls_go_to_another_controller_once_one_is_killed(tmp_path: Path) -> None:
    """Two that serve: what the one that dies has not begun to answer, the other answers."""
    edge = Edge(tmp_path, 2)
    try:
        edge.deploy(*edge.addresses)
        with MeshClient(edge.grpc) as client:
            for n in range(NEW_CALLS):
                if n == NEW_CALLS // 5:
                    edge.controllers[0].kill()
                assert client.get(NAME).spec.name == NAME
                assert NAME in edge.get("/v1/models")
    finally:
        edge.close()


def test_new_calls_go_elsewhere_once_a_controller_hangs(tmp_path: Path) -> None:
    """Two looks at its health time out. What it was asked by gRPC before breaks off within 8 s, and
    the other one answers that, too.
    """
    times = as_long_s(1.0)
    edge = Edge(tmp_path, 2, timeout=f"{times:g}s")
    try:
        edge.deploy(*edge.addresses)
        with MeshClient(edge.grpc) as client, ThreadPoolExecutor(4) as threads:
            client.get(NAME)
            edge.controllers[0].send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            before = [threads.submit(client.get, NAME) for _ in range(4)]
            edge.until(lambda: edge.leads_to(1))
            assert time.monotonic() - began_s <= 6 * times
            for _ in range(NEW_CALLS):
                assert client.get(NAME).spec.name == NAME
                assert NAME in edge.get("/v1/models")
            assert time.monotonic() - began_s <= 12 * times
            assert all(call.result().spec.name == NAME for call in before)
            assert time.monotonic() - began_s <= 16 * times
    finally:
        edge.close()


@pytest.mark.parametrize("killed", ["leader", "front"])
def test_answers_go_on_behind_it_and_no_new_call_fails_when_one_is_killed(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: str,
) -> None:
    """Callers know its address alone. It finds the one that leads then, or another front."""
    # As long as a busy machine may take for it.
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", WAIT_S_MAX)
    if killed == "front":
        edge = Edge(tmp_path, 1, fronts=2)
    else:
        server, cell = map(request.getfixturevalue, ("server", "cell"))
        edge = Edge(tmp_path, 2, state=server.url(cell))
    try:
        edge.deploy(edge.grpc, slo=PATIENT)
        edge.until(lambda: all(map(serves, edge.front_addresses)))
        with MeshClient(edge.grpc) as client, ThreadPoolExecutor(CALLERS) as threads:
            unbroken = invoked(client, NAME, "go on", max_tokens=100, temperature=1.0, seed=7)
            unbroken.finished()
            answers = [
                invoked(client, NAME, "go on", max_tokens=100, temperature=1.0, seed=7)
                for _ in range(4)
            ]
            until_s = time.monotonic() + WAIT_S_MAX
            while min(len(answer.token_ids) for answer in answers) < 3:
                assert time.monotonic() < until_s
                time.sleep(0.02)
            if killed == "front":
                edge.fronts[most_asked(edge)].kill()
            else:
                edge.controllers[leader(edge)].kill()
            new = replace(ASKED, max_tokens=3, ignore_eos=True)
            calls = [
                threads.submit(lambda: list(client.invoke(new, timeout_s=WAIT_S_MAX)))
                for _ in range(CALLS)
            ]
            for answer in answers:
                answer.finished()
                assert answer.token_ids == unbroken.token_ids
            for call in calls:
                last = call.result()[-1]
                assert isinstance(last, Finished)
                assert last.output_tokens == 3
        edge.until(lambda: NAME in edge.get("/v1/models"))
    finally:
        edge.close()


def test_a_front_that_drains_gets_no_call_and_ends_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers take longer than Envoy's default limit of 15 s, and no client resumes one."""
    monkeypatch.setattr("mesh.wire.resuming.RESUME_S_MAX", -1.0)
    edge = Edge(tmp_path, 1, step_s=0.2, fronts=2)
    try:
        edge.deploy(edge.grpc, slo=PATIENT)
        with MeshClient(edge.grpc) as client, ThreadPoolExecutor(4) as threads:
            # A front that has not seen it yet knows no such model.
            edge.until(lambda: all(map(serves, edge.front_addresses)))
            began_s = time.monotonic()
            asked = {"max_tokens": 150, "ignore_eos": True}
            streams = [threads.submit(edge.complete, **asked) for _ in range(4)]
            answers = [invoked(client, NAME, "slowly", max_tokens=150) for _ in range(4)]
            edge.until(lambda: sum(map(asked_of, edge.front_addresses)) == 8)
            drained = most_asked(edge)
            edge.fronts[drained].terminate()
            edge.until(lambda: edge.leads_to(1))
            assert not any(stream.done() for stream in streams), "they outlast Envoy's notice"
            for _ in range(NEW_CALLS):
                assert client.get(NAME).spec.name == NAME
                assert NAME in edge.get("/v1/models")
            for stream in streams:
                assert '"finish_reason":"length"' in stream.result()
                assert stream.result().endswith("data: [DONE]\n\n")
            for answer in answers:
                assert answer.finished().output_tokens == 150
            assert time.monotonic() - began_s > 16.0
        assert edge.fronts[drained].wait(WAIT_S_MAX) == 0
    finally:
        edge.close()


def test_what_a_leader_refuses_is_asked_once(tmp_path: Path) -> None:
    """No other could answer it, and each time that it is asked counts for its tenant's limits."""
    edge = Edge(tmp_path, 1)
    try:
        edge.deploy(edge.grpc)
        edge.nodes[0].kill()
        with MeshClient(edge.grpc) as client:
            edge.until(lambda: all(n.state is not NodeState.READY for n in client.nodes()))
            with pytest.raises(Refused) as refused:
                list(client.invoke(ASKED, timeout_s=WAIT_S_MAX))
            assert refused.value.reason is RefusalReason.NO_NODE
        with pytest.raises(requests.HTTPError, match="503"):
            edge.complete()
        assert edge.retries() == 0
    finally:
        edge.close()


def test_what_a_front_that_stops_refuses_another_answers(tmp_path: Path) -> None:
    """Envoy calls both, since it has not looked for a while."""
    looks = {"interval": "60s", "no_traffic_healthy_interval": "60s", "unhealthy_interval": "0.25s"}
    edge = Edge(tmp_path, 1, step_s=0.2, fronts=2, **looks)
    try:
        edge.deploy(edge.grpc, slo=PATIENT)
        with MeshClient(edge.grpc) as client:
            edge.until(lambda: all(map(serves, edge.front_addresses)))
            streams = [invoked(client, NAME, "go on", max_tokens=100) for _ in range(4)]
            edge.until(lambda: all(map(asked_of, edge.front_addresses)))
            edge.fronts[0].terminate()
            edge.until(lambda: refuses(edge.front_addresses[0]))
            for again in (
                lambda: list(client.invoke(replace(ASKED, max_tokens=2), timeout_s=WAIT_S_MAX)),
                lambda: edge.complete(max_tokens=2),
            ):
                before = edge.retries()
                for _ in range(4):
                    again()
                assert edge.retries() > before
            for stream in streams:
                stream.finished()
    finally:
        edge.close()


def serves(address: str) -> bool:
    with MeshClient(address) as client:
        return any(one.state is DeploymentState.READY for one in client.list())


def refuses(address: str) -> bool:
    """Whether a front takes no calls any more."""
    with dial_blocking(address) as channel:
        return look_blocking(channel) is Look.FOLLOWS


def asked_of(address: str) -> int:
    with MeshClient(address) as client:
        return len(client.requests())


def most_asked(edge: Edge) -> int:
    """The front that has the most open calls."""
    return max(range(len(edge.fronts)), key=lambda n: asked_of(edge.front_addresses[n]))


def leader(edge: Edge) -> int:
    for n, address in enumerate(edge.addresses):
        with MeshClient(address) as client:
            try:
                client.status()
            except Unavailable:
                continue
            return n
    raise AssertionError("nobody leads")
