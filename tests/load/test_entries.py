"""Locust's own statistics of calls, made in a process of its own: locust patches Python's."""

import json
import subprocess
import sys

SCRIPT = """
import json
from locust.env import Environment
from mesh_load import entries
from tests.evaluation.replay.made import RESULTS

environment = Environment()
environment.create_local_runner()
for result in RESULTS:
    entries.log(environment, result)
stats = environment.stats
rows = {" ".join(key): (e.num_requests, e.num_failures) for key, e in stats.entries.items()}
reasons = sorted(str(error.error) for error in stats.errors.values())
print(json.dumps({"rows": rows, "total": stats.total.num_requests, "reasons": reasons}))
"""


def test_entries_of_the_slo_are_of_the_calls_that_are_judged() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60.0
    )
    found = json.loads(ran.stdout)
    # Of chat, one was not sent and one left when the run was stopped.
    assert found["rows"] == {
        "chat call": [6, 3],
        "chat TTFT": [3, 0],
        "chat TPOT": [3, 0],
        "chat SLO mean": [4, 2],
        "chat SLO each": [4, 2],
        "code call": [2, 1],
        "code TTFT": [1, 0],
        "code TPOT": [1, 0],
        "code SLO mean": [2, 2],
        "code SLO each": [2, 2],
    }
    assert found["total"] == 8
    assert "refused: memory_full" in " ".join(found["reasons"])
