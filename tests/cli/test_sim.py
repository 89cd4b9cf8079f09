"""`mesh sim`: its numbers, its forms and its failures."""

import json
from pathlib import Path

import pytest

from mesh.runtime.journal import ControllerStart, read_journal
from tests.cli.running import mesh
from tests.sim.scenarios import SMALL


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_the_numbers_of_a_run_are_shown(scenario: str) -> None:
    ran = mesh("sim", scenario)
    assert ran.code == 0, ran.err
    names = [line.split("  ")[0] for line in ran.out.splitlines()]
    assert names[:4] == ["policy", "seed", "requests", "SLO met, every token"]
    assert "gpu nodes in use" in names
    assert "NODE" in ran.out
    assert "gpu-2" in ran.out


def test_json_has_all_of_it_and_follows_from_the_seed(scenario: str) -> None:
    first, again, other = (
        json.loads(mesh("sim", scenario, "-o", "json", "--seed", seed).out)
        for seed in ("7", "7", "8")
    )
    for made in (first, again, other):
        assert made.pop("wall_s") > 0
    assert first == again
    assert first["requests"] != other["requests"]
    assert (first["policy"], first["seed"]) == ("llm-mesh", 7)
    assert first["requests"]["met"] <= first["requests"]["finished"]
    assert len(first["nodes"]) == 3


def test_a_policy_takes_the_place_of_the_scenarios_and_the_journal_says_so(
    scenario: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    ran = mesh("sim", scenario, "--policy", "fcfs", "--journal", str(journal), "-o", "json")
    assert json.loads(ran.out)["policy"] == "fcfs"
    start, decisions = read_journal(journal)
    assert isinstance(start, ControllerStart)
    assert start.policy == "fcfs"
    assert sum(1 for _ in decisions) > 10


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("absent.toml",), 1, "absent.toml"),
        (("--policy", "best"), 2, "best"),
    ],
)
def test_failures_are_two_lines(
    scenario: str, arguments: tuple[str, ...], code: int, named: str
) -> None:
    where = arguments if arguments[0].endswith("toml") else (scenario, *arguments)
    ran = mesh("sim", *where)
    assert ran.code == code
    assert named in ran.error_lines[0]


def test_a_wrong_scenario_is_a_usage_error_that_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(SMALL.replace("seed = 3", "sead = 3"))
    ran = mesh("sim", str(path))
    assert ran.code == 2
    assert "sead" in ran.error_lines[0]
