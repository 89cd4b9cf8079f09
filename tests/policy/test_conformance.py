"""What holds under any policy: a cell in which everything goes wrong keeps its invariants, nobody
hangs, and the same run makes the same journal. For a policy of your own:

    pytest tests/policy/test_conformance.py --policy FILE.py
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.actions import NotePolicyFault
from mesh.policy.registry import known_policies
from mesh.sim.checking import FaultyRun
from mesh.sim.scenario import arrivals, faults, plan, read_scenario, trace_of
from mesh.sim.workload import Serverless
from tests.support.depth import DEEP

ROOT = Path(__file__).parents[2]
EXAMPLES = tuple(str(path) for path in sorted((ROOT / "examples/policies").glob("*.py")))
ADVERSARY = str(ROOT / "tests/support/adversary.py")
ARRIVALS_S, FAULTS_S = (10.0, 100.0) if DEEP else (3.0, 30.0)
SEEDS = range(1, 4 if DEEP else 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.config.getoption("--policy")
    every = (*known_policies(), *EXAMPLES, ADVERSARY) if chosen is None else (chosen,)
    metafunc.parametrize("policy", every, ids=lambda text: Path(text).stem)


class Decisions:
    """The decisions of a run, as its journal would have them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.faults: list[NotePolicyFault] = []

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        self.lines.append(repr((now_s, event, actions)))
        self.faults += [action for action in actions if isinstance(action, NotePolicyFault)]


def checked_run(policy: str, seed: int, *, check: bool = True) -> Decisions:
    """A cell under faults; with `check`, held to its invariants after every decision, and until it
    has come to rest.
    """
    scenario = read_scenario(ROOT / "workloads/faults.toml")
    work = scenario.workload
    assert isinstance(work, Serverless)
    assert scenario.faults is not None
    short = replace(
        scenario,
        policy=policy,
        seed=seed,
        workload=replace(work, duration_s=ARRIVALS_S),
        faults=replace(scenario.faults, until_s=FAULTS_S),
    )
    made, seen = plan(short), Decisions()
    run = FaultyRun(made, faults(short, made), check=check, started=lambda start: [seen])
    run.run(arrivals(short, trace_of(short)))
    return seen


def test_a_cell_keeps_its_invariants_and_decides_the_same_twice(policy: str) -> None:
    for seed in SEEDS:
        once = checked_run(policy, seed)
        # A check asks the policy, too, and notes its faults: without them, the rest is the same.
        again = checked_run(policy, seed, check=bool(once.faults))
        assert once.lines[: len(again.lines)] == again.lines, f"{seed=}"
        assert len(again.lines) > 100
        assert bool(once.faults) == (policy == ADVERSARY), once.faults[:3]
