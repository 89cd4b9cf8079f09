"""The plan of a cell on this machine: its nodes' names, its address, each node's share."""

import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.cli import children
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import (
    NODES_MAX,
    CellPlan,
    NodePlan,
    free_address,
    on_numa_nodes,
    plan_nodes,
)
from mesh.cli.children import Child
from mesh.domain.errors import InvalidInput, Unavailable
from mesh.domain.reasons import DeviceKind
from mesh_nodes.hardware import Hardware


def test_nodes_without_a_name_get_the_next_free_one_of_their_device() -> None:
    plans = plan_nodes(["cpu", "cpu=cpu1", "cpu", "gpu", "cpu=big"])
    assert [(plan.device, plan.name) for plan in plans] == [
        ("cpu", "cpu0"),
        ("cpu", "cpu1"),
        ("cpu", "cpu2"),
        ("gpu", "gpu0"),
        ("cpu", "big"),
    ]


@pytest.mark.parametrize("wanted", [["CPU"], ["=a"], [""], ["cpu="], ["cpu=a b"], ["cpu=a"] * 2])
def test_nodes_that_cannot_be_meant_are_refused(wanted: list[str]) -> None:
    with pytest.raises(InvalidInput):
        plan_nodes(wanted)


def test_their_number_is_bounded() -> None:
    assert len(plan_nodes(["cpu"] * NODES_MAX)) == NODES_MAX
    with pytest.raises(InvalidInput, match=f"more than the {NODES_MAX}"):
        plan_nodes(["cpu"] * (NODES_MAX + 1))


def test_port_0_is_a_free_port_and_another_stays() -> None:
    host, _, port = free_address("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert free_address(f"{host}:{port}") == f"{host}:{port}"


def test_a_port_that_is_listened_on_is_refused_and_one_in_time_wait_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unavailable, match="address already in use"):
            free_address(address)
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()
    assert free_address(address) == address


def test_an_address_that_this_machine_does_not_reach_itself_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where its loopback interface is down, which `unshare -rn mesh demo` shows."""

    def unreachable(address: tuple[str, int], timeout: float) -> socket.socket:
        raise OSError(errno.ENETUNREACH, f"{address[0]} is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    said = "this machine does not reach 127.0.0.1:[0-9]+ itself: 127.0.0.1 is unreachable"
    with pytest.raises(Unavailable, match=said) as caught:
        free_address("127.0.0.1:0")
    assert "ip link set lo up" in caught.value.hint


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What each child would have been told, by its name."""
    told: dict[str, list[str]] = {}

    def start(
        name: str, module: str, arguments: list[str], log_path: Path, *, again: bool
    ) -> Child:
        assert not again
        told[name] = [module, *arguments]
        return Child(name=name, process=None, log_path=log_path)  # type: ignore[arg-type]

    monkeypatch.setattr(children, "start", start)
    machine = Hardware(cpu="c", cores=5, memory_bytes=10_000, isa=())
    monkeypatch.setattr("mesh_nodes.hardware.probe", lambda: machine)
    return told


def test_a_lone_node_takes_what_the_agent_takes_by_itself(started: dict[str, list[str]]) -> None:
    plan = CellPlan(
        listen="0.0.0.0:0", home=Path("/h"), nodes=plan_nodes(["cpu"]), policy="llm-mesh"
    )
    local = LocalCell(plan)
    local.start()
    port = local.address.rpartition(":")[2]
    assert started == {
        "the controller": [
            "mesh.controller",
            *("--listen", f"0.0.0.0:{port}", "--policy", "llm-mesh", "--home", "/h"),
        ],
        "node cpu0": [
            "mesh_nodes",
            *("--join", f"127.0.0.1:{port}", "--name", "cpu0", "--device", "cpu", "--home", "/h"),
        ],
    }


def test_nodes_get_a_policy_file_for_its_turn_rule(started: dict[str, list[str]]) -> None:
    nodes = plan_nodes(["cpu"])
    LocalCell(
        CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes, policy="/mine.py")
    ).start()
    files = [told[told.index("--policy") + 1] for told in started.values()]
    assert files == ["/mine.py"] * 2


def test_a_node_on_each_numa_node_takes_what_is_near(started: dict[str, list[str]]) -> None:
    nodes = on_numa_nodes(plan_nodes(["gpu", "cpu"]), [0, 2])
    assert [node.name for node in nodes] == ["gpu0", "cpu0", "cpu2"]
    LocalCell(
        CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes, precision="bf16", kv="u8")
    ).start()
    assert started["node cpu2"][-8:-2] == ["--numa", "2", "--precision", "bf16", "--kv", "u8"]
    assert not {"--memory", "--threads"} & set(started["node cpu2"])
    assert not {"--numa", "--precision", "--kv"} & set(started["node gpu0"])


@pytest.mark.parametrize(
    ("wanted", "numbers", "said"),
    [
        (["cpu", "cpu=b"], [0, 1], "and 2 are wanted"),
        (["gpu"], [0, 1], "and 0 are wanted"),
        (["cpu", "gpu=cpu1"], [0, 1], "two nodes are named cpu1"),
        (["cpu"], [], "tells of no NUMA node"),
    ],
)
def test_wrong_numa_nodes_are_refused(wanted: list[str], numbers: list[int], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        on_numa_nodes(plan_nodes(wanted), numbers)


def test_several_nodes_share_the_machine_evenly(started: dict[str, list[str]]) -> None:
    nodes = plan_nodes(["cpu", "cpu"])
    LocalCell(CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes)).start()
    for name in ("cpu0", "cpu1"):
        told = started[f"node {name}"]
        assert told[told.index("--memory") + 1] == "3500"
        assert told[told.index("--page-cache") + 1] == "750", "a half of half of the rest"
        assert told[told.index("--threads") + 1] == "2"


def test_a_node_starts_on_cpus_of_its_own_and_the_others_where_the_cell_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, set[int]] = {}

    def start(name: str, module: str, told: list[str], log_path: Path, *, again: bool) -> Child:
        seen[name] = os.sched_getaffinity(0)
        return Child(name=name, process=None, log_path=log_path)  # type: ignore[arg-type]

    monkeypatch.setattr(children, "start", start)
    mine = os.sched_getaffinity(0)
    own, other = plan_nodes(["cpu", "cpu"])
    nodes = replace(own, cpus=frozenset({max(mine)})), other
    LocalCell(CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes)).start()
    assert seen == {"the controller": mine, "node cpu0": {max(mine)}, "node cpu1": mine}
    assert os.sched_getaffinity(0) == mine


def test_gpu_nodes_are_numbered_and_take_no_share_of_memory(started: dict[str, list[str]]) -> None:
    nodes = plan_nodes(["gpu", "cpu", "gpu"])
    LocalCell(CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes)).start()
    for name, number in (("gpu0", "0"), ("gpu1", "1")):
        told = started[f"node {name}"]
        assert told[told.index("--gpu") + 1] == number
        assert "--memory" not in told
        assert told[told.index("--asleep-memory") + 1] == "1666", "a third of half"
    told = started["node cpu0"]
    assert told[told.index("--memory") + 1] == "7000"
    assert "--gpu" not in told
    assert "--asleep-memory" not in told


def test_a_lone_gpu_node_sleeps_in_what_the_agent_takes(started: dict[str, list[str]]) -> None:
    nodes = plan_nodes(["gpu"])
    LocalCell(CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes)).start()
    assert started["node gpu0"][-4:] == ["--gpu", "0", "--home", "/h"]


def test_what_is_given_for_a_node_holds_for_each(started: dict[str, list[str]]) -> None:
    nodes = plan_nodes(["cpu", "cpu"])
    plan = CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes, memory_bytes=77, threads=9)
    LocalCell(plan).start()
    assert started["node cpu1"][-6:] == ["--memory", "77", "--threads", "9", "--home", "/h"]


def test_what_a_node_has_of_its_own_goes_before_its_share(started: dict[str, list[str]]) -> None:
    own = NodePlan(name="own", device=DeviceKind.CPU, engine="vllm", memory_bytes=88)
    nodes = (own, *plan_nodes(["cpu"]))
    LocalCell(CellPlan(listen="127.0.0.1:0", home=Path("/h"), nodes=nodes)).start()
    assert started["node own"][-8:-2] == ["--engine", "vllm", "--memory", "88", "--threads", "2"]
    assert "--engine" not in started["node cpu0"]
