"""Nodes that keep the weights of a model once hold more instances of it, and no byte more."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from mesh.domain.reasons import FinishReason
from mesh.runtime.host import Recorder
from mesh.runtime.journal import ControllerStart
from mesh.sim.checking import FaultyRun
from mesh.sim.scenario import arrivals, plan
from tests.sim.scenarios import scenario

CELL = """
seed = 1

[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 14
shares_weights = true

[[deployments]]
name = "chat"
count = 4
model = "llama-3.2-3b"
context_tokens_max = 4096
slo = { ttft_s = 8.0, ttft_tokens_per_s = 256, tpot_s = 0.5 }
scaling = { keep_alive_s = 30.0 }

[workload]
duration_s = 60
requests_per_s = 0.5
input_tokens = [16, 200]
output_tokens = [1, 40]
"""
"""Weights of 6 GiB, and 1.5 GiB of each instance's own."""


class AtOnce:
    """Counts the instances that are loaded."""

    def __init__(self) -> None:
        self.most = 0
        self.run: FaultyRun | None = None

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if self.run is not None:
            instances = self.run.cell.core.cell.instances.values()
            self.most = max(self.most, sum(instance.is_loaded for instance in instances))


@pytest.mark.parametrize(("shares", "at_once"), [(True, 4), (False, 1)])
def test_a_node_holds_all_deployments_of_a_model_where_it_held_one(
    tmp_path: Path, shares: bool, at_once: int
) -> None:
    text = CELL if shares else CELL.replace("shares_weights = true", "")
    cell, counted = scenario(tmp_path, text), AtOnce()

    def started(start: ControllerStart) -> tuple[Recorder, ...]:
        return (counted,)

    counted.run = FaultyRun(plan(cell), check=True, started=started)
    outcomes = counted.run.run(arrivals(cell))
    assert all(isinstance(outcome.end, FinishReason) for outcome in outcomes)
    (node,) = counted.run.cell.nodes
    assert counted.most == at_once
    assert (node.engine.loads == 4) is shares, "else they take each other's place"
