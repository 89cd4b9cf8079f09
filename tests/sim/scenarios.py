"""A small scenario for tests, as its TOML text."""

from pathlib import Path

from mesh.sim.scenario import Scenario, read_scenario

SMALL = """
seed = 3

[[nodes]]
name = "cpu"
device = "cpu"
memory_gib = 64

[[nodes]]
name = "gpu"
count = 2
device = "gpu"
memory_gib = 40

[[deployments]]
name = "chat"
count = 3
model = "llama-2-7b"

[[deployments]]
name = "small"
model = "llama-3.2-3b"
context_tokens_max = 4096

[workload]
duration_s = 10
requests_per_s = 2.0
input_tokens = [16, 600]
output_tokens = [1, 40]
"""


def scenario(folder: Path, text: str = SMALL) -> Scenario:
    path = folder / "small.toml"
    path.write_text(text)
    return read_scenario(path)
