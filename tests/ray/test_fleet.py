"""`mesh fleet` on a Ray of three machines: what joins, what dies, and what comes back.

These run in their order, on one Ray: starting it takes longer than they do.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("ray") is None:
    pytest.skip("no Ray here: `make test-ray` has it", allow_module_level=True)
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    pytest.skip("not in a network namespace of its own: `make test-ray`", allow_module_level=True)

from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Finished, Invocation, InvocationEvent, TextPrompt
from mesh.domain.lifecycle import NodeState
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient
from tests.e2e.live_cell import SETTLED, LiveCell
from tests.ray.machines import RayMachines
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import until

MACHINES = ("m1", "m2", "m3")
NODES = {f"{machine}-cpu0" for machine in MACHINES}
JOIN_S_MAX = 60.0
"""On a busy machine; on a quiet one it is 10 s, and 5 s for what comes back."""
CALLS = 1000
"""While Ray is dead and started anew."""
ASKERS = 8


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayMachines]:
    made = RayMachines(tmp_path_factory.mktemp("m"))
    made.start()
    for machine in MACHINES:
        made.join(machine)
    try:
        yield made
    finally:
        made.kill()
        for pid in made.agents().values():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCell]:
    home = tmp_path_factory.mktemp("cell")
    cell = LiveCell(home, home)
    cell.start_controller()
    yield cell
    cell.close()


def joined(cell: LiveCell) -> set[str]:
    with MeshClient(cell.address) as client:
        return {str(n.node_id) for n in client.nodes() if n.state is NodeState.READY}


def settled(cell: LiveCell, machines: RayMachines, names: set[str]) -> bool:
    return joined(cell) == names and set(machines.agents()) == names


def up(machines: RayMachines, cell: LiveCell, *how: str) -> None:
    join = ("--join", cell.address, "--memory", "400MiB", "--grace-s", "10", *SETTLED)
    done = machines.mesh("up", *how, *join)
    assert done.returncode == 0, done.stderr


def test_as_many_agents_as_asked_join_the_cell(machines: RayMachines, cell: LiveCell) -> None:
    up(machines, cell, "--nodes", "2")
    until(lambda: len(joined(cell)) == 2, JOIN_S_MAX)
    assert machines.mesh("scale", "3").returncode == 0
    until(lambda: settled(cell, machines, NODES), JOIN_S_MAX)


def test_a_killed_agent_is_back(machines: RayMachines, cell: LiveCell) -> None:
    before = machines.agents()["m2-cpu0"]
    os.kill(before, signal.SIGKILL)
    until(lambda: machines.agents().get("m2-cpu0", before) != before, JOIN_S_MAX)
    until(lambda: settled(cell, machines, NODES), JOIN_S_MAX)


def test_agents_outlive_their_actors_which_find_them_again(
    machines: RayMachines, cell: LiveCell
) -> None:
    before = machines.agents()
    assert {agent["starts"] for agent in seen(machines)["agents"]} != {0}
    for process in machines.actors():
        process.kill()
    until(lambda: [agent["starts"] for agent in seen(machines)["agents"]] == [0, 0, 0], JOIN_S_MAX)
    assert {agent["pid"] for agent in seen(machines)["agents"]} == set(before.values())
    assert machines.agents() == before


def test_no_call_notices_that_ray_dies_and_is_started_anew(
    machines: RayMachines, cell: LiveCell, tmp_path: Path
) -> None:
    before = machines.agents()
    spec = DeploymentSpec(
        name=DeploymentName("tiny"),
        source=f"file://{write_tiny_llama(tmp_path / 'tiny', seed=1)}",
        slo=Slo(ttft_s=30.0, tpot_s=2.0),
        scaling=Scaling(replicas_min=3, replicas_max=3, keep_alive_s=600.0),
    )
    with MeshClient(cell.address) as client:
        client.deploy(spec)
        until(lambda: len(client.get(spec.name).instances) == 3, JOIN_S_MAX)
    left, lost = iter(range(CALLS)), threading.Event()

    def ask() -> list[InvocationEvent]:
        ends: list[InvocationEvent] = []
        with MeshClient(cell.address) as client:
            for _ in left:
                asked = Invocation(
                    deployment=spec.name,
                    prompt=TextPrompt(text="once upon a time"),
                    max_tokens=4,
                    ignore_eos=True,
                )
                ends.append(list(client.invoke(asked))[-1])
                lost.wait(0.0 if lost.is_set() else 0.05)
        return ends

    with ThreadPoolExecutor(ASKERS) as pool:
        asking = [pool.submit(ask) for _ in range(ASKERS)]
        machines.kill()
        machines.start()
        for machine in reversed(MACHINES):
            machines.join(machine)
        up(machines, cell, "--nodes", "3")
        lost.set()
        ends = [end for each in asking for end in each.result()]
    assert len(ends) == CALLS
    assert all(isinstance(end, Finished) for end in ends)
    assert machines.agents() == before
    assert {agent["starts"] for agent in seen(machines)["agents"]} == {0}


def test_the_fleet_follows_what_the_controller_wants(machines: RayMachines, cell: LiveCell) -> None:
    with WantingController(1) as controller:
        up(machines, cell, "--wanted", controller.url)
        until(lambda: len(joined(cell)) == len(machines.agents()) == 1, JOIN_S_MAX)
        controller.count = 3
        until(lambda: settled(cell, machines, NODES), JOIN_S_MAX)
        controller.count = None
        until(lambda: "does not say" in seen(machines)["problem"], JOIN_S_MAX)
        assert settled(cell, machines, NODES)


def test_what_is_wrong_is_said(machines: RayMachines, cell: LiveCell) -> None:
    join = ("--join", cell.address)
    began_s = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        done = machines.mesh("status", "--ray", at)
        assert (done.returncode, "no Ray answers" in done.stderr) == (1, True)
    assert time.monotonic() - began_s < JOIN_S_MAX
    done = machines.mesh("status", "--ray", "127.0.0.1:1")
    assert (done.returncode, "no Ray answers" in done.stderr) == (1, True)
    done = machines.mesh("status", "--ray", "nowhere")
    assert (done.returncode, "is no address of Ray" in done.stderr) == (2, True)
    done = machines.mesh("status", "--device", "gpu")
    assert (done.returncode, "has no gpu fleet" in done.stderr) == (1, True)
    done = machines.mesh("up", "--nodes", "1", *join, "--", "--name", "mine")
    assert (done.returncode, "--name" in done.stderr) == (2, True)
    done = machines.mesh("up", "--nodes", "4", *join)
    assert (done.returncode, "Ray has 3 devices" in done.stderr) == (1, True)


def test_a_fleet_that_goes_down_drains_its_agents(machines: RayMachines, cell: LiveCell) -> None:
    assert machines.mesh("down").returncode == 0
    assert machines.agents() == {}
    until(lambda: not joined(cell), JOIN_S_MAX)
    machines.mesh("up", "--nodes", "1", "--join", cell.address, "--memory", "no size")
    until(lambda: any("no size" in a["failure"] for a in seen(machines)["agents"]), JOIN_S_MAX)
    assert machines.mesh("down").returncode == 0


def seen(machines: RayMachines) -> Any:
    """What `status` tells; without agents while the supplier is being started anew."""
    told = machines.mesh("status", "-o", "json")
    return json.loads(told.stdout) if told.returncode == 0 else {"agents": []}


class WantingController:
    """A controller's word for how many nodes it wants; `None`: it answers 503."""

    def __init__(self, count: int | None) -> None:
        self.count = count

    def __enter__(self) -> "WantingController":
        outer = self

        class Said(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/api/v1/nodes/wanted" and outer.count is not None
                self.send_response(200 if known else 503)
                self.end_headers()
                self.wfile.write(json.dumps({"cpu": {"wanted": outer.count}}).encode())

            def log_message(self, *said: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Said)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()
