"""A GPU node that serves more models at a time than it has memory for: every token in time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mesh.domain.events import NodeReported
from mesh.domain.messages import Heartbeat
from mesh.sim.checking import FaultyRun
from mesh.sim.cluster import Arrival
from mesh.sim.scenario import plan
from tests.sim.scenarios import scenario

MODELS = 5
FULL = f"""
[[nodes]]
name = "gpu"
device = "gpu"
memory_gib = 40
costs = {{ load_bytes_per_s = 20e9, load_s = 0.2 }}

[[deployments]]
name = "chat"
count = {MODELS}
model = "llama-2-7b"
context_tokens_max = 1024

[limits]
kv_tokens_least = 256

[workload]
duration_s = 10
requests_per_s = 1.0
input_tokens = [1, 1]
output_tokens = [1, 1]
"""
CALLS = [Arrival(1.0 + n, f"chat-{n % MODELS + 1}", 50 + n, 200) for n in range(2 * MODELS)]


class Outs:
    """The instances that heartbeats have told to be without weights beside requests."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def record(self, now_s: float, event: object, actions: Sequence[object]) -> None:
        if isinstance(event, NodeReported) and isinstance(event.report, Heartbeat):
            out = [i.instance_id for i in event.report.instances if i.out and i.batch]
            self.seen.update(out)


def met(folder: Path, policy: str, outs: Outs) -> int:
    """The calls of which every token was in time, in a cell that is held to its invariants."""
    made = plan(replace(scenario(folder, FULL), policy=policy))
    run = FaultyRun(made, [], check=True, started=lambda start: [outs])
    return sum(outcome.met for outcome in run.run(CALLS))


def test_more_models_than_fit_take_turns_on_the_device(tmp_path: Path) -> None:
    outs = Outs()
    assert met(tmp_path, "mesh", outs) == len(CALLS)
    assert len(outs.seen) >= MODELS - 1
    assert met(tmp_path, "llm-mesh", outs) < len(CALLS)
