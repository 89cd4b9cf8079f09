"""Whether a deployment can be changed, changed back and moved without a request that fails.

Callers ask it without a pause while a manifest with another model is deployed, undone, and the node
that serves is drained, each once a share of the requests has ended. Two models of the demo model's
shape, two nodes. The last line is one JSON object: `requests` that finished, `failed`, and how long
each change took until one revision served alone. Exit code 1 when any failed.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.cells import local_cell
from bench.own_models import own_source, plant_models
from bench.printing import errors_told, exit_by, last_line, rounded, show_status
from bench.rollout.load import Load
from mesh.cli.cell_plan import plan_nodes
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import Cancelled
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import InstanceState
from mesh.domain.revision import RevisionState
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient

NAME = DeploymentName("changing")
MODELS = ("old", "new")
STEPS = ("update", "undo", "drain")
TOKENS = 8
CHANGE_S_MAX = 300.0
POLL_S = 0.05


def spec(model: str) -> DeploymentSpec:
    return DeploymentSpec(
        name=NAME,
        source=own_source(model),
        context_tokens_max=1024,
        slo=Slo(ttft_s=20.0, tpot_s=2.0),
        scaling=Scaling(replicas_min=1, keep_alive_s=600.0),
    )


def serves_alone(client: MeshClient, number: int) -> bool:
    found = client.get(NAME)
    under_way = {RevisionState.STARTING, RevisionState.RETIRING}
    return found.revision == number and under_way.isdisjoint(v.state for v in found.revisions)


def timed(done: Callable[[], bool]) -> float:
    """Seconds until it is. Raises Cancelled."""
    begun_s = time.monotonic()
    while not done():
        if time.monotonic() - begun_s > CHANGE_S_MAX:
            raise Cancelled(f"a change was not done within {CHANGE_S_MAX:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic() - begun_s


def drained(client: MeshClient) -> Callable[[], bool]:
    """Drain the node that serves; whether it is empty."""
    node_id = next(i.node_id for i in client.get(NAME).instances if i.state is InstanceState.READY)
    client.drain(node_id)
    return lambda: all(not n.instances for n in client.nodes() if n.node_id == node_id)


def run(client: MeshClient, load: Load, requests: int) -> dict[str, float]:
    """Seconds of each change."""
    took: dict[str, float] = {}
    for number, step in enumerate(STEPS, start=1):
        show_status(f"{step}: {load.finished} requests")
        if step == "update":
            client.deploy(spec("new"))
            took[step] = timed(lambda: serves_alone(client, 2))
        elif step == "undo":
            client.undo(NAME)
            took[step] = timed(lambda: serves_alone(client, 3))
        else:
            took[step] = timed(drained(client))
        load.until(number * requests // len(STEPS), wait_s_max=CHANGE_S_MAX)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="at least (%(default)s)")
    parser.add_argument("--callers", type=int, default=4, help="(%(default)s)")
    options = parser.parse_args()
    with errors_told(), tempfile.TemporaryDirectory() as folder:
        plant_models(Path(folder), MODELS)
        nodes = plan_nodes(["cpu=a", "cpu=b"])
        with (
            local_cell(store=Path(folder), nodes=nodes, threads=1) as cell,
            MeshClient(cell.address) as client,
        ):
            client.deploy(spec("old"))
            wait_for(client, NAME, Goal.READY, CHANGE_S_MAX)
            with Load(client, NAME, callers=options.callers, tokens=TOKENS) as load:
                took = run(client, load, options.requests)
    for error in load.failed[:8]:
        print(f"failed: {error}")
    seconds = {f"{step}_s": rounded(value) for step, value in took.items()}
    last_line({"requests": load.finished, "failed": len(load.failed), **seconds})
    exit_by({"requests": load.finished >= options.requests, "failed": not load.failed})


if __name__ == "__main__":
    main()
