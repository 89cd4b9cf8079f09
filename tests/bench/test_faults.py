"""The bench of faults: it adds seeds up, goes on behind one that fails, and names it."""

import json
from pathlib import Path

import pytest

from bench.faults import Total, played, report, runs
from mesh.sim.scenario import Scenario
from tests.sim.scenarios import SMALL, scenario

FAULTS = """
[faults]
until_s = 8
per_minute = { crash = 30, cancel = 30 }
"""


@pytest.fixture
def read(tmp_path: Path) -> Scenario:
    return scenario(tmp_path, SMALL + FAULTS)


def test_seeds_are_added_up(read: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    total = Total()
    for ran in runs(read, range(3, 5), jobs=1):
        total.add(ran)
    alone = [played(read, seed) for seed in (3, 4)]
    report(total, 1.0, Path("small.toml")).end()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["seeds"], told["seeds_broken"]) == (2, [])
    assert told["requests"] == sum(sum(ran.ends.values()) for ran in alone) > 10
    assert told["faults"]["crash"] == sum(ran.faults["crash"] for ran in alone) > 0
    assert told["checks"]["decisions"] > 100


def test_a_seed_that_fails_is_named_with_its_command_and_the_others_go_on(
    read: Scenario, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    total = Total()
    with monkeypatch.context() as broken:
        broken.setattr("mesh.sim.checking.STUCK_S", -1e6)
        total.add(played(read, 3))
    total.add(played(read, 4))
    report(total, 1.0, Path("small.toml")).end()
    out = capsys.readouterr().out
    assert "broken: RuleBroken: requests are stuck" in out
    assert "again: mesh sim small.toml --check --seed 3\n" in out
    told = json.loads(out.splitlines()[-1])
    assert (told["seeds"], told["seeds_broken"]) == (2, [3])
