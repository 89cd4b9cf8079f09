"""A mixed cell as a user starts one: `mesh controller`, two `mesh node`s, `mesh deploy`.

The first node computes with OpenVINO, the second with vLLM, each on one core: vLLM on a CPU stands
in for a GPU node. All processes end with `close`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from mesh.cli.cell_plan import free_address
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.domain.lifecycle import InstanceState
from mesh.domain.profile import Profile
from mesh.domain.slo import Slo
from mesh.wire.client import MeshClient

NAME = "chat"
FIRST, SECOND = "openvino", "vllm"
"""Names of the nodes, and of their engines. The first is the fuller one, which is tried first."""
MEMORY = {FIRST: "2GiB", SECOND: "4GiB"}
CONTEXT_TOKENS = 256
KEEP_ALIVE_S = 2.0
PATIENT = Slo(ttft_s=60.0, tpot_s=5.0)
"""Until there is a profile to promise by."""
JOIN_S_MAX = 120.0
"""vLLM's imports take ten seconds on an idle machine, and come before the node joins."""
VERB_S_MAX = 360.0
"""Of one command. To measure a profile takes half a minute on an idle machine."""
STOP_S_MAX = 10.0
POLL_S = 0.1
LOG_TAIL_BYTES = 3000
MESH = str(Path(sys.executable).with_name("mesh"))


class MixedCell:
    """Its state is under `root`. Raises MeshError when a part of it does not do its."""

    def __init__(self, root: Path) -> None:
        self.address = free_address("127.0.0.1:0")
        self._root = root
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "MixedCell":
        try:
            self._start("controller", "--listen", self.address)
            for node_id in (FIRST, SECOND):
                self._start(
                    "node",
                    *("--join", self.address, "--name", node_id, "--engine", node_id),
                    *("--memory", MEMORY[node_id], "--threads", "1"),
                    log=node_id,
                )
            self.wait_for("both nodes to join", lambda: self._joined() == {FIRST, SECOND})
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and what they have started."""
        for number, wait_s in ((signal.SIGTERM, STOP_S_MAX), (signal.SIGKILL, None)):
            for process in self._processes.values():
                _signal_group(process, number)
            for process in self._processes.values():
                try:
                    process.wait(wait_s)
                except subprocess.TimeoutExpired:
                    continue

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
            [MESH, *arguments],
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
        """Of the deployment's instances, by node."""
        with MeshClient(self.address) as client:
            instances = client.get(DeploymentName(NAME)).instances
        return {str(instance.node_id): instance.state for instance in instances}

    def second_is_idle(self) -> bool:
        """Whether the second node's instance has given its KV cache back, or has gone."""
        return self.states().get(SECOND) in (None, InstanceState.PARKED)

    def check_alive(self) -> None:
        """Raises MeshError, with the end of its log, when a process has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise MeshError(f"{name} ended with {process.returncode}:\n{self._tail(name)}")

    def wait_for(self, what: str, condition: Callable[[], bool], s_max: float = JOIN_S_MAX) -> None:
        """Raises Unavailable, with the ends of the logs, when it takes longer."""
        until_s = time.monotonic() + s_max
        while not condition():
            self.check_alive()
            if time.monotonic() > until_s:
                tails = "\n".join(f"--- {name}\n{self._tail(name)}" for name in self._processes)
                raise Unavailable(f"waited {s_max:.0f} s in vain for {what}\n{tails}")
            time.sleep(POLL_S)

    def _start(self, verb: str, *arguments: str, log: str = "") -> None:
        name = log or verb
        with (self._root / f"{name}.log").open("wb") as file:
            self._processes[name] = subprocess.Popen(
                [MESH, verb, *arguments, "--home", str(self._root)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def _tail(self, name: str) -> str:
        return (self._root / f"{name}.log").read_text(errors="replace")[-LOG_TAIL_BYTES:]

    def _joined(self) -> set[str]:
        try:
            # A channel of its own each time: one that was refused would first back off for a while.
            with MeshClient(self.address) as client:
                return {str(node.node_id) for node in client.nodes()}
        except Unavailable:
            return set()

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


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
