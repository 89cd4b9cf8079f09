"""Nodes of a group: their hardware, its tables, and how they resize."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput
from mesh.sim.costs import NodeCosts, Resizing
from mesh.sim.scenario import plan, read_scenario
from mesh.sim.testbed import known_model
from tests.sim.scenarios import SMALL, scenario

CELLS = sorted((Path(__file__).parents[2] / "workloads").glob("*.toml"))


def test_nodes_are_of_the_devices_own_hardware_unless_they_name_it(tmp_path: Path) -> None:
    made = plan(scenario(tmp_path, SMALL.replace('"cpu"\nmem', '"cpu"\nhardware = "xeon-8"\nmem')))
    small, gpu = made.nodes[0], made.nodes[1]
    assert (small.hello.cores, small.hello.fingerprint) == (8, "testbed/xeon-8")
    assert (gpu.hello.cores, gpu.hello.hardware) == (0, "A100-80GB")
    assert plan(scenario(tmp_path)).nodes[0].hello.fingerprint == "testbed/xeon-32"


def test_the_controller_knows_the_tables_of_the_hardware_that_is_there(tmp_path: Path) -> None:
    made = plan(scenario(tmp_path, SMALL.replace('"cpu"\nmem', '"cpu"\nhardware = "xeon-16"\nmem')))
    known = {profile.fingerprint for profile in made.profiles}
    assert known == {"testbed/xeon-16", "testbed/a100-80gb"}


def test_a_group_says_what_its_nodes_may_load_ahead(tmp_path: Path) -> None:
    text = SMALL.replace("memory_gib = 64", "memory_gib = 64\nprefetch_gib = 1.5")
    assert [n.hello.prefetch_bytes for n in plan(scenario(tmp_path, text)).nodes] == [3 << 29, 0, 0]
    with pytest.raises(InvalidInput, match="prefetch_gib is -1; it must be 0 or more"):
        scenario(tmp_path, text.replace("1.5", "-1"))


def test_fewer_cores_are_slower() -> None:
    costs = known_model("llama-3.2-3b").costs
    prefill_s = [costs[key].profile.prefill.seconds[-1][0] for key in ("xeon-32", "xeon-16")]
    assert prefill_s[0] < prefill_s[1] < costs["xeon-8"].profile.prefill.seconds[-1][0]


def test_hardware_must_be_of_the_device(tmp_path: Path) -> None:
    for wrong in ("a100-80gb", "i486"):
        text = SMALL.replace('"cpu"\nmem', f'"cpu"\nhardware = "{wrong}"\nmem')
        with pytest.raises(InvalidInput, match=f"{wrong}.*xeon-32, xeon-16, xeon-8"):
            scenario(tmp_path, text)


def test_a_model_not_measured_on_a_node_is_refused_unless_kept_off(tmp_path: Path) -> None:
    text = SMALL.replace('"cpu"\nmem', '"cpu"\nhardware = "xeon-8"\nmem')
    text = text.replace('"llama-2-7b"', '"llama-2-13b"')
    with pytest.raises(InvalidInput, match="llama-2-13b was not measured on xeon-8"):
        plan(scenario(tmp_path, text))
    off = text.replace('"llama-2-13b"', '"llama-2-13b"\ndevices = ["gpu"]')
    assert len(plan(scenario(tmp_path, off)).deployments) == 4


def test_copies_cost_what_llm_mesh_measured() -> None:
    """§6.2: 32 GB down to 16 GB in 0.3 s, up to 64 GB in 1.9 s."""
    copies = NodeCosts(resize=Resizing.COPIES)
    assert copies.resize_time_s(32_000_000_000, 16_000_000_000) == pytest.approx(0.3)
    assert copies.resize_time_s(32_000_000_000, 64_000_000_000) == pytest.approx(1.9)
    assert copies.resize_time_s(5, 5) == 0.0


def test_maps_cost_by_what_changes() -> None:
    maps = NodeCosts(resize_s=0.002, resize_bytes_per_s=1e9)
    assert maps.resize_time_s(10_000_000_000, 11_000_000_000) == pytest.approx(1.002)
    assert maps.resize_time_s(11_000_000_000, 10_000_000_000) == pytest.approx(1.002)


def test_weights_that_are_resident_load_in_no_time(tmp_path: Path) -> None:
    text = SMALL.replace("= 64", "= 64\ncosts = { load_s = 0, load_bytes_per_s = inf }")
    assert plan(scenario(tmp_path, text)).nodes[0].costs.load_time_s(1 << 40) == 0.0


def test_what_a_scenario_says_of_costs_comes_before_the_devices_own(tmp_path: Path) -> None:
    read = scenario(
        tmp_path, SMALL.replace("= 40\n", "= 40\nprocesses = 2\ncosts = { load_s = 9 }\n")
    )
    for ideal, gpu_bytes in ((False, 40 << 30), (True, 37 << 30)):
        cpu, gpu, _ = plan(replace(read, ideal=ideal)).nodes
        assert (gpu.costs.load_s, cpu.costs.load_s) == (9.0, 0.3)
        assert gpu.hello.memory_bytes == gpu_bytes
        assert bool(cpu.costs.jitter.decode_shares) is not ideal


COSTS_THAT_CANNOT_BE = (
    "load_bytes_per_s = 0",
    "grow_copy_bytes_per_s = -1",
    "resize_s = -1",
    "load_slowdown = 0",
)


@pytest.mark.parametrize("cost", COSTS_THAT_CANNOT_BE)
def test_a_cost_that_cannot_be_is_refused(tmp_path: Path, cost: str) -> None:
    text = SMALL.replace("= 64", f"= 64\ncosts = {{ {cost} }}")
    with pytest.raises(InvalidInput, match=cost.split()[0]):
        scenario(tmp_path, text)


def test_a_scenario_may_say_how_the_pace_of_a_node_changes(tmp_path: Path) -> None:
    text = SMALL.replace("= 64", "= 64\ncosts = { pace = { window_s = 2, factors = [1, 1.5] } }")
    pace = plan(scenario(tmp_path, text)).nodes[0].costs.pace
    assert [pace.at(now_s) for now_s in (1.0, 2.5, 4.0)] == [1.0, 1.5, 1.0]


@pytest.mark.parametrize("path", CELLS, ids=lambda path: path.stem)
def test_the_cells_that_ship_with_mesh_can_be_made(path: Path) -> None:
    made = plan(read_scenario(path))
    assert made.nodes
    assert len(CELLS) >= 3
