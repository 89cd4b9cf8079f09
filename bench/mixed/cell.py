"""A mixed cell as a user has one: a controller, two nodes, and what `mesh` does with them.

The first node computes with OpenVINO, the second with vLLM, each on one core: vLLM on a CPU stands
in for a GPU node.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.cells import MESH, local_cell
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import NodePlan
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import InstanceState
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient

NAME = "chat"
FIRST, SECOND = "openvino", "vllm"
"""Names of the nodes, and of their engines. The first is the fuller one, which is tried first."""
MEMORY_BYTES = {FIRST: 2 * 2**30, SECOND: 4 * 2**30}
CONTEXT_TOKENS = 256
KEEP_ALIVE_S = 2.0
PATIENT = Slo(ttft_s=60.0, tpot_s=5.0)
"""Until there is a profile to promise by."""
WAIT_S_MAX = 120.0
VERB_S_MAX = 360.0
"""The longest that one command may take. Measuring a profile takes half a minute on an idle
machine.
"""
POLL_S = 0.1


@contextmanager
def mixed_cell(root: Path) -> Iterator["MixedCell"]:
    """With its state, and a model store of its own, under `root`. Raises MeshError when a part of
    it does not do its.
    """
    (root / "store").mkdir()
    nodes = [
        NodePlan(name=name, device=DeviceKind.CPU, engine=name, memory_bytes=memory_bytes)
        for name, memory_bytes in MEMORY_BYTES.items()
    ]
    with local_cell(home=root, nodes=nodes, threads=1) as cell:
        yield MixedCell(cell, root)


class MixedCell:
    """While it runs."""

    def __init__(self, cell: LocalCell, root: Path) -> None:
        self.address = cell.address
        self.check_alive = cell.check_alive
        self._cell = cell
        self._root = root

    # What a user does.

    def deploy(self, source: str, slo: Slo) -> None:
        """With nothing loaded; instead of what is deployed."""
        with MeshClient(self.address) as client:
            deployed = [deployment.spec.name for deployment in client.list()]
        if NAME in deployed:
            self.mesh("delete", NAME)
            self.wait_for("its instances to go", lambda: not self._instances_on_nodes())
        manifest = self._root / "model.yaml"
        manifest.write_text(_manifest(source, slo))
        self.mesh("deploy", str(manifest))

    def measured(self, node_id: str) -> Profile:
        """Measure the deployment's model on a node: its profile."""
        self.mesh("profile", NAME, "--node", node_id)
        with MeshClient(self.address) as client:
            for view in client.profiles(DeploymentName(NAME)):
                if node_id in view.nodes and view.profile.measured:
                    return view.profile
        raise MeshError(f"there is no measured profile for {node_id} after measuring one")

    def mesh(self, *arguments: str) -> str:
        """What one command prints. Raises MeshError with what it says when it fails."""
        done = subprocess.run(
            [*MESH, *arguments],
            env={**os.environ, "MESH_CONTROLLER": self.address},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERB_S_MAX,
        )
        if done.returncode:
            raise MeshError(f"mesh {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    # What a user sees.

    def states(self) -> dict[str, InstanceState]:
        """The states of the deployment's instances, by node."""
        with MeshClient(self.address) as client:
            instances = client.get(DeploymentName(NAME)).instances
        return {str(instance.node_id): instance.state for instance in instances}

    def second_is_idle(self) -> bool:
        """Whether the second node's instance has given its KV cache back, or has gone."""
        return self.states().get(SECOND) in (None, InstanceState.PARKED)

    def wait_for(self, what: str, condition: Callable[[], bool], s_max: float = WAIT_S_MAX) -> None:
        """Raises Unavailable, with the ends of the logs, when it takes longer."""
        until_s = time.monotonic() + s_max
        while not condition():
            self.check_alive()
            if time.monotonic() > until_s:
                logs = ([f"--- {child.name}", *child.log_tail()] for child in self._cell.children)
                tails = "\n".join(line for log in logs for line in log)
                raise Unavailable(f"waited {s_max:.0f} s in vain for {what}\n{tails}")
            time.sleep(POLL_S)

    def _instances_on_nodes(self) -> int:
        with MeshClient(self.address) as client:
            return sum(len(node.instances) for node in client.nodes())


def _manifest(source: str, slo: Slo) -> str:
    lines: Sequence[str] = (
        "apiVersion: mesh/v1",
        "kind: Model",
        f"metadata: {{name: {NAME}}}",
        "spec:",
        f"  source: {source}",
        f"  context_tokens_max: {CONTEXT_TOKENS}",
        f"  slo: {{ttft_s: {slo.ttft_s:.6f}, tpot_s: {slo.tpot_s:.6f}}}",
        f"  scaling: {{replicas_min: 0, replicas_max: 2, keep_alive_s: {KEEP_ALIVE_S}}}",
        "  devices: [cpu]",
    )
    return "\n".join(lines) + "\n"
