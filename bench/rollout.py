"""Whether a deployment can be changed, changed back and moved without a request that fails.

Callers ask it without a pause while a manifest with another model is deployed, undone, and the node
that serves is drained, each once a share of the requests has ended. Two models of the demo model's
shape, two nodes. The last line is one JSON object: `requests` that finished, `failed`, and how long
each change took until one revision served alone. Exit code 1 when any failed.
"""

import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.cells import local_cell, wait_until
from bench.harness import Report, rounded, show_status
from bench.own_models import own_source, plant_models
from mesh.cli.cell_plan import plan_nodes
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import MeshError
from mesh.domain.ids import DeploymentName
from mesh.domain.invocation import Finished, Invocation, TextPrompt
from mesh.domain.lifecycle import InstanceState
from mesh.domain.revision import RevisionState
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient


class Load:
    """A context: they stop when it is left."""

    def __init__(
        self, client: MeshClient, name: DeploymentName, *, callers: int, tokens: int
    ) -> None:
        self.finished = 0
        self.failed: list[MeshError] = []
        self._client = client
        self._asked = Invocation(
            deployment=name,
            prompt=TextPrompt(text="through it all"),
            max_tokens=tokens,
            ignore_eos=True,
        )
        self._tokens = tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._stop.is_set():
            try:
                *_, last = self._client.invoke(self._asked)
                if not isinstance(last, Finished) or last.output_tokens != self._tokens:
                    raise MeshError(f"an answer ended as {last}")
            except MeshError as error:
                with self._lock:
                    self.failed.append(error)
            else:
                with self._lock:
                    self.finished += 1

    def until(self, finished: int, *, wait_s_max: float) -> None:
        """Wait until so many have their answers, or one has failed. Raises Unavailable."""
        wait_until(
            lambda: self.finished >= finished or bool(self.failed),
            f"not {finished} answers",
            wait_s_max,
        )


NAME = DeploymentName("changing")
MODELS = ("old", "new")
STEPS = ("update", "undo", "drain")
TOKENS = 8
CHANGE_S_MAX = 300.0


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


def drained(client: MeshClient) -> Callable[[], bool]:
    """Drain the node that serves; whether it is empty."""
    node_id = next(i.node_id for i in client.get(NAME).instances if i.state is InstanceState.READY)
    client.drain(node_id)
    return lambda: all(not n.instances for n in client.nodes() if n.node_id == node_id)


def changed(client: MeshClient, load: Load, requests: int) -> dict[str, float]:
    """Seconds of each change."""
    took: dict[str, float] = {}
    done = partial(wait_until, what="a change is not done", s_max=CHANGE_S_MAX)
    for number, step in enumerate(STEPS, start=1):
        show_status(f"{step}: {load.finished} requests")
        if step == "update":
            client.deploy(spec("new"))
            took[step] = done(lambda: serves_alone(client, 2))
        elif step == "undo":
            client.undo(NAME)
            took[step] = done(lambda: serves_alone(client, 3))
        else:
            took[step] = done(drained(client))
        load.until(number * requests // len(STEPS), wait_s_max=CHANGE_S_MAX)
    return took


def run(*, requests: int = 1000, callers: int = 4) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        plant_models(Path(folder), MODELS)
        nodes = plan_nodes(["cpu=a", "cpu=b"])
        with (
            local_cell(store=Path(folder), nodes=nodes, threads=1) as cell,
            MeshClient(cell.address) as client,
        ):
            client.deploy(spec("old"))
            wait_for(client, NAME, Goal.READY, CHANGE_S_MAX)
            with Load(client, NAME, callers=callers, tokens=TOKENS) as load:
                took = changed(client, load, requests)
    seconds = {f"{step}_s": rounded(value) for step, value in took.items()}
    return Report(
        figures={"requests": load.finished, "failed": len(load.failed), **seconds},
        shown=[f"failed: {error}" for error in load.failed[:8]],
        targets={"requests": f">= {requests}", "failed": "== 0"},
    )
