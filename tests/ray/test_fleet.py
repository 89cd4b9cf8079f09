"""`mesh fleet` on a Ray of three machines: what joins, what dies, and what comes back.

They share it, since it takes longer to start than they do, and each brings about what it needs.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient
from tests.e2e.live_cell import SETTLED, LiveCell
from tests.http.test_wanted import scaled
from tests.ray.provider import HEAD, configuration
from tests.support.ray_machines import RayMachines
from tests.support.tiny_model import write_tiny_llama
from tests.support.waiting import as_long_s, until

pytestmark = pytest.mark.timeout(900)
logger = logging.getLogger(__name__)
MACHINES = ("m1", "m2", "m3")
NODES = {f"{machine}-cpu0" for machine in MACHINES}
JOIN_S, BACK_S, SAID_S, BURST_S = 10.0, 5.0, 10.0, 15.0
"""Until agents have joined, what was killed is back, an error is said, and the nodes that a burst
lacks have joined, on a quiet machine.
"""
WAIT_S_MAX = 60.0
"""For all else."""
POLL_S = 0.1
ROOM_FOR_ONE = "300MiB"
"""The memory of a node that holds one of the tiny model's instances, and not two."""
HTTP = "127.0.0.1:8070"
"""Where the controller says how many nodes it wants: nobody else is in this network."""
URL = f"http://{HTTP}/api/v1/nodes/wanted"
WANTS = ("--http", HTTP, "--nodes-wanted", f"cpu=1..{len(MACHINES)}", "--queue-wait-s", "60")
CALLS = 1000
"""While Ray is dead and started anew."""
ASKERS = 8


@pytest.fixture(scope="module")
def ray_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayMachines]:
    made = RayMachines(tmp_path_factory.mktemp("m"), MACHINES)
    try:
        yield made
    finally:
        made.clear()


@pytest.fixture
def machines(ray_machines: RayMachines) -> RayMachines:
    """All of them run, whatever the test before has left."""
    if not ray_machines.live():
        ray_machines.clear()
        ray_machines.start()
    return ray_machines


@pytest.fixture
def autoscaled(ray_machines: RayMachines, tmp_path: Path) -> Iterator[RayMachines]:
    """The head alone, whose autoscaler brings machines as they are asked for."""
    ray_machines.clear()
    config = tmp_path / "machines.yaml"
    config.write_text(json.dumps(configuration(ray_machines.folder, len(MACHINES))))
    ray_machines.start_head("--autoscaling-config", str(config), **HEAD)
    yield ray_machines
    ray_machines.clear()


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCell]:
    home = tmp_path_factory.mktemp("cell")
    cell = LiveCell(home, home)
    cell.start_controller(*WANTS)
    yield cell
    cell.close()


@pytest.fixture
def agents(machines: RayMachines, cell: LiveCell) -> dict[str, int]:
    """The fleet has three nodes: the processes of their agents."""
    up(machines, cell, "--nodes", "3")
    eventually(lambda: settled(cell, machines, NODES))
    return machines.agents()


def eventually(
    condition: Callable[[], bool], s_max: float = WAIT_S_MAX, since_s: float | None = None
) -> None:
    """Within `s_max` since then, or since now. Log at INFO says how long it took."""
    began_s = time.monotonic() if since_s is None else since_s
    until(condition, max(began_s + s_max - time.monotonic(), 0.0), POLL_S)
    logger.info("after %.1f s", time.monotonic() - began_s)


def bound(quiet_s: float) -> float:
    """Three times as long as on a quiet machine."""
    return as_long_s(3 * quiet_s)


def joined(cell: LiveCell) -> set[str]:
    return {str(n.node_id) for n in cell.client.nodes() if n.state is NodeState.READY}


def settled(cell: LiveCell, machines: RayMachines, names: set[str]) -> bool:
    return joined(cell) == names and set(machines.agents()) == names


def count(cell: LiveCell, machines: RayMachines, nodes: int) -> bool:
    return len(joined(cell)) == len(machines.agents()) == nodes


def node_options(cell: LiveCell) -> tuple[str, ...]:
    return ("--join", cell.address, "--memory", ROOM_FOR_ONE, "--grace-s", "10", *SETTLED)


def fleet(machines: RayMachines, *words: str) -> None:
    """Have the fleet be so. It is asked again where Ray was too busy to start its actor in time."""
    for _ in range(3):
        done = machines.mesh(*words)
        if "has not answered" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr


def up(machines: RayMachines, cell: LiveCell, *how: str) -> None:
    fleet(machines, "up", *how, *node_options(cell))


def tiny(name: str, source: Path, *, least: int, most: int) -> DeploymentSpec:
    return DeploymentSpec(
        name=DeploymentName(name),
        source=f"file://{source}",
        slo=Slo(ttft_s=WAIT_S_MAX, tpot_s=2.0),
        scaling=Scaling(replicas_min=least, replicas_max=most, keep_alive_s=600.0),
    )


def ask(client: MeshClient, name: DeploymentName) -> InvocationEvent:
    """The end of a short answer."""
    asked = Invocation(
        deployment=name,
        prompt=TextPrompt(text="once upon a time"),
        max_tokens=4,
        ignore_eos=True,
    )
    return list(client.invoke(asked))[-1]


def test_as_many_agents_as_asked_join_the_cell(machines: RayMachines, cell: LiveCell) -> None:
    began_s = time.monotonic()
    up(machines, cell, "--nodes", "2")
    eventually(lambda: count(cell, machines, 2), bound(JOIN_S), began_s)
    fleet(machines, "scale", "3")
    eventually(lambda: settled(cell, machines, NODES))


def test_a_killed_agent_is_back(
    machines: RayMachines, cell: LiveCell, agents: dict[str, int]
) -> None:
    killed = agents["m2-cpu0"]
    os.kill(killed, signal.SIGKILL)
    began_s = time.monotonic()
    eventually(lambda: machines.agents().get("m2-cpu0", killed) != killed, bound(BACK_S), began_s)
    eventually(lambda: settled(cell, machines, NODES), bound(BACK_S), began_s)


def test_agents_outlive_their_actors_which_find_them_again(
    machines: RayMachines, agents: dict[str, int]
) -> None:
    killed = machines.actors()
    for process in killed:
        process.kill()
    began_s = time.monotonic()
    eventually(lambda: len(set(machines.actors()) - set(killed)) == len(killed), bound(BACK_S))
    starts = [0, 0, 0]
    eventually(
        lambda: [a["starts"] for a in seen(machines)["agents"]] == starts, bound(BACK_S), began_s
    )
    assert {agent["pid"] for agent in seen(machines)["agents"]} == set(agents.values())
    assert machines.agents() == agents


def test_a_lost_machine_is_told_and_its_agent_is_back_with_it(
    machines: RayMachines, cell: LiveCell, agents: dict[str, int]
) -> None:
    """The other machines go on meanwhile, and no keeper is waited for that cannot be."""
    machines.lose("m2")
    eventually(lambda: "m2-cpu0" in seen(machines)["problem"])
    assert machines.agents() == {name: pid for name, pid in agents.items() if name != "m2-cpu0"}
    machines.start_machine("m2")
    eventually(lambda: settled(cell, machines, NODES))
    eventually(lambda: not seen(machines)["problem"])


def test_a_machine_that_cannot_be_used_is_told_and_the_others_are_used(
    machines: RayMachines, cell: LiveCell, agents: dict[str, int]
) -> None:
    machines.start_machine("m4", MESH_HOME="~nobody-of-this-name/mesh")
    try:
        eventually(lambda: "m4 is not used" in seen(machines)["problem"])
        fleet(machines, "scale", "2")
        eventually(lambda: count(cell, machines, 2))
        fleet(machines, "scale", "3")
        eventually(lambda: settled(cell, machines, NODES))
    finally:
        machines.lose("m4")


def test_no_call_notices_that_ray_dies_and_is_started_anew(
    machines: RayMachines, cell: LiveCell, agents: dict[str, int], tmp_path: Path
) -> None:
    spec = tiny("tiny-1", write_tiny_llama(tmp_path / "tiny-1", seed=1), least=3, most=3)
    cell.client.deploy(spec)
    eventually(lambda: len(cell.client.get(spec.name).instances) == 3)
    left, lost = iter(range(CALLS)), threading.Event()

    def ask_on() -> list[InvocationEvent]:
        ends: list[InvocationEvent] = []
        with MeshClient(cell.address) as client:
            for _ in left:
                ends.append(ask(client, spec.name))
                lost.wait(0.0 if lost.is_set() else 0.05)
        return ends

    with ThreadPoolExecutor(ASKERS) as pool:
        asking = [pool.submit(ask_on) for _ in range(ASKERS)]
        try:
            machines.kill()
            machines.start()
            up(machines, cell, "--nodes", "3")
        finally:
            lost.set()
        ends = [end for each in asking for end in each.result()]
    cell.client.delete(spec.name)
    assert len(ends) == CALLS
    assert all(isinstance(end, Finished) for end in ends)
    assert machines.agents() == agents
    assert {agent["starts"] for agent in seen(machines)["agents"]} == {0}


def test_what_is_wrong_is_said(machines: RayMachines, cell: LiveCell, tmp_path: Path) -> None:
    join = ("--join", cell.address)
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.0.0'\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        said(machines, 1, "no Ray answers", "status", "--ray", at)
    said(machines, 1, "no Ray answers", "status", "--ray", "127.0.0.1:1")
    said(machines, 2, "is no address of Ray", "status", "--ray", "nowhere")
    said(machines, 2, "--name", "up", "--nodes", "1", *join, "--", "--name", "mine")
    said(machines, 1, "has no gpu fleet", "status", "--device", "gpu")
    said(machines, 1, "Ray: 2.0.0", "status", PYTHONPATH=str(tmp_path))
    said(machines, 1, "Ray has 3 devices", "up", "--nodes", "4", *join)


def said(machines: RayMachines, code: int, text: str, *words: str, **environ: str) -> None:
    """`mesh fleet` with these words ends with an error that says this, and with a hint."""
    began_s = time.monotonic()
    done = machines.mesh(*words, **environ)
    assert (done.returncode, text in done.stderr, "hint: " in done.stderr) == (code, True, True), (
        done.stderr
    )
    assert time.monotonic() - began_s < bound(SAID_S), text


def test_a_fleet_that_goes_down_drains_its_agents(
    machines: RayMachines, cell: LiveCell, agents: dict[str, int]
) -> None:
    fleet(machines, "down")
    assert machines.agents() == {}
    eventually(lambda: not joined(cell))


def test_agents_whose_options_are_wrong_say_so(machines: RayMachines, cell: LiveCell) -> None:
    machines.mesh("down")
    try:
        done = machines.mesh("up", "--nodes", "1", "--join", cell.address, "--memory", "no size")
        # It takes an agent that has lived for a while for a good one, which is long here at times.
        assert done.returncode == 0 or "no size" in done.stderr
        eventually(lambda: any("no size" in a["failure"] for a in seen(machines)["agents"]))
    finally:
        fleet(machines, "down")


def test_rays_machines_follow_what_the_controller_wants(
    autoscaled: RayMachines, cell: LiveCell, tmp_path: Path
) -> None:
    """A burst takes one node to three, on machines that Ray's autoscaler brings, and no call fails.
    They stay while no controller answers, and two go once there is nothing to do. KEDA's scaler
    reads the same figures.
    """
    machines = autoscaled
    # It does not wait for as long as a machine takes that Ray has yet to bring.
    machines.mesh("up", "--wanted", f"http://{HTTP}", *node_options(cell))
    eventually(lambda: count(cell, machines, 1))
    sources = [write_tiny_llama(tmp_path / f"tiny-{seed}", seed=seed) for seed in range(2, 5)]
    specs = [tiny(source.name, source, least=0, most=1) for source in sources]
    for spec in specs:
        cell.client.deploy(spec)
    ready = DeploymentState.READY  # what follows is of no import
    eventually(lambda: all(cell.client.get(spec.name).state is ready for spec in specs))
    assert scaled(URL, "", "cpu.wanted") == 1.0
    began_s = time.monotonic()
    for spec in specs:
        cell.client.scale(spec.name, replicas_min=1)
    with ThreadPoolExecutor(len(specs)) as pool:
        ends = pool.map(lambda spec: ask(cell.client, spec.name), specs)
        eventually(lambda: scaled(URL, "", "cpu.wanted") == 3.0, as_long_s(BURST_S), began_s)
        eventually(lambda: settled(cell, machines, NODES), as_long_s(BURST_S), began_s)
        assert all(isinstance(end, Finished) for end in ends)
    before = machines.agents()
    cell.controller.kill()
    eventually(lambda: "does not say" in seen(machines)["problem"])
    assert machines.agents() == before
    cell.start_controller(*WANTS)
    for spec in specs:
        cell.client.delete(spec.name)
    eventually(lambda: count(cell, machines, 1) and seen(machines)["places"] == 1)
    assert scaled(URL, "", "cpu.wanted") == 1.0


def seen(machines: RayMachines) -> Any:
    """What `status` tells; without agents while the supplier is being started anew."""
    told = machines.mesh("status", "-o", "json")
    nothing = {"agents": [], "places": 0, "problem": ""}
    return json.loads(told.stdout) if told.returncode == 0 else nothing
