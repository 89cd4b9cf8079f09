"""How well loads are foretold in a cell whose loads take longer beside iterations."""

from pathlib import Path
from statistics import fmean, median

import pytest

from mesh.domain.events import NodeReported
from mesh.domain.messages import InstanceLoaded
from mesh.sim.cluster import VirtualCell
from mesh.sim.scenario import arrivals, plan
from tests.sim.scenarios import scenario

STRETCH = 2.4
CONTENDED = f"""
seed = 1

[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 60
costs = {{ factor = 0.12, load_s = 0.26, load_bytes_per_s = inf, load_stretch = {STRETCH} }}

[[deployments]]
name = "m"
count = 20
model = "llama-3.2-3b"
context_tokens_max = 1024
slo = {{ ttft_s = 4.0, tpot_s = 0.3 }}

[workload]
duration_s = 100
requests_per_s = 2
input_tokens = [20, 34]
output_tokens = [16, 96]
"""


def test_a_hundred_loads_of_20_models_under_contention_are_expected_to_a_tenth(
    tmp_path: Path,
) -> None:
    """Memory for 8 of them; loads of 0.26 to 0.62 s. First loads count, and so does who comes
    amid a load, which nobody knows when it begins.
    """
    loads: list[tuple[float, float, float]] = []

    class Loads:
        def record(self, now_s: float, event: object, actions: object) -> None:
            if isinstance(event, NodeReported) and isinstance(event.report, InstanceLoaded):
                instance = cell.core.cell.instances[event.report.instance_id]
                took_s = now_s - instance.load_started_s
                loads.append((took_s, instance.load_expected_s, instance.load_s))

    made = scenario(tmp_path, CONTENDED)
    cell = VirtualCell(plan(made), recorders=(Loads(),))
    cell.run(tuple(arrivals(made)))
    took_s = [took_s for took_s, _, _ in loads]
    assert len(loads) >= 100
    assert max(took_s) > 2.2 * min(took_s)
    assert fmean(abs(expected_s - s) / s for s, expected_s, _ in loads) < 0.1
    assert fmean(abs(median(took_s) - s) / s for s in took_s) > 0.1
    (node,) = cell.core.cell.nodes.values()
    assert cell.core.cell.expectations.slowdown(node.hello) == pytest.approx(STRETCH - 1, rel=0.15)
