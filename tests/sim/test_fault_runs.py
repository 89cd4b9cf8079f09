"""Whole cells under seeded faults, held to everything that must hold of any cell.

`MESH_FAULT_SEEDS` says how many seeds there are, `MESH_FAULT_SEED` is the first; one that fails
prints the command that shows it again.
"""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.sim.checking import FaultyRun
from mesh.sim.faults import FaultKind
from mesh.sim.scenario import arrivals, faults, plan, read_scenario

SEEDS = int(os.environ.get("MESH_FAULT_SEEDS") or (24 if "CI" in os.environ else 8))
FIRST = int(os.environ.get("MESH_FAULT_SEED") or 0)
MANY = 20
"""Runs in which every kind of fault has happened."""
SCENARIO = Path(__file__).parents[2] / "workloads" / "faults.toml"


@pytest.mark.timeout(7200)
def test_nothing_is_lost_doubled_stuck_or_promised_twice() -> None:
    read = read_scenario(SCENARIO)
    done: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        scenario = replace(read, seed=seed)
        made = plan(scenario)
        run = FaultyRun(made, faults(scenario, made), check=True)
        try:
            outcomes = run.run(arrivals(scenario))
        except Exception as error:
            error.add_note(f"mesh sim workloads/faults.toml --check --seed {seed}")
            raise
        asked = sum(1 for _ in arrivals(scenario))
        assert len({o.request_id for o in outcomes}) == len(outcomes) == asked
        ends.update(str(o.end) for o in outcomes)
        done.update(dict(run.counts().faults))
    assert ends["length"] >= 50 * SEEDS, "the faults leave nothing of the work"
    assert SEEDS < MANY or set(done) == {kind.value for kind in FaultKind}
