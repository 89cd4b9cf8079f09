"""Scenarios: what a file makes, and what it may not say."""

from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import InvalidInput, MeshError, NotFound
from mesh.sim.scenario import arrivals, plan, read_scenario
from tests.sim.scenarios import SMALL, scenario


def test_a_file_becomes_nodes_and_deployments(tmp_path: Path) -> None:
    made = plan(scenario(tmp_path))
    assert [node.hello.node_id for node in made.nodes] == ["cpu", "gpu-1", "gpu-2"]
    names = [deployment.spec.name for deployment in made.deployments]
    assert names == ["chat-1", "chat-2", "chat-3", "small"]
    assert made.deployments[3].context_tokens_max == 4096
    assert made.nodes[0].hello.memory_bytes == 64 << 30


def test_arrivals_follow_from_the_seed_and_keep_to_their_bounds(tmp_path: Path) -> None:
    read = replace(scenario(tmp_path), seed=5)
    drawn = list(arrivals(read))
    assert drawn == list(arrivals(read))
    assert drawn != list(arrivals(replace(read, seed=6)))
    assert all(0 < a.at_s <= 10 and 16 <= a.input_tokens <= 600 for a in drawn)
    assert [a.at_s for a in drawn] == sorted(a.at_s for a in drawn)
    long = replace(read, workload=replace(read.workload, duration_s=2000.0))
    assert 3700 < sum(1 for _ in arrivals(long)) < 4300


@pytest.mark.parametrize(
    ("was", "now", "named"),
    [
        ("seed = 3", "sead = 3", "sead"),
        ("memory_gib = 64", "", "memory_gib"),
        ("memory_gib = 64", "memory_gib = -1", "above 0"),
        ('device = "cpu"', 'device = "tpu"', "tpu"),
        ("count = 3", "count = 0", "count is 0"),
        ('name = "small"', 'name = "chat-1"', "differ"),
        ("[16, 600]", "[600, 16]", "600"),
        ("requests_per_s = 2.0", "requests_per_s = 0", "above 0"),
        ('"llama-2-7b"', '"gpt-9"', "gpt-9"),
        ("[workload]", "[workload", "TOML"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, was: str, now: str, named: str) -> None:
    assert was in SMALL
    with pytest.raises(MeshError, match=named):
        plan(scenario(tmp_path, SMALL.replace(was, now, 1)))


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_scenario(tmp_path / "absent.toml")


def test_refusals_of_a_file_are_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        scenario(tmp_path, "nodes = 1")
