"""A cell on this machine: the controller and its node agents as child processes.

`mesh up` and `mesh demo` start one, wait until it serves, watch it and stop it. It decides what
each child is told (address, home, its share of the machine); `children` keeps the processes.
"""

import time
from collections.abc import Callable, Sequence

from mesh.cli import children, output
from mesh.cli.cell_plan import CellPlan, NodePlan, free_address
from mesh.cli.children import Child
from mesh.domain.errors import MeshError, Unavailable
from mesh.domain.lifecycle import NodeState
from mesh.domain.reasons import DeviceKind
from mesh.wire.channel import format_address, parse_address
from mesh.wire.client import MeshClient
from mesh_nodes import hardware

READY_S_MAX = 120.0
"""From the start of the children until every node has joined. An engine's import takes seconds."""
POLL_S = 0.1
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""A controller that listens on every address is reached from here on the loopback."""


class LocalCell:
    """Owns the child processes from `start` to `stop`."""

    def __init__(self, plan: CellPlan) -> None:
        self._plan = plan
        self._listen = plan.listen
        self._children: list[Child] = []

    @property
    def address(self) -> str:
        """Where clients on this machine reach the controller."""
        host, port = parse_address(self._listen)
        return format_address(_REACHED_AT.get(host, host), port)

    @property
    def children(self) -> tuple[Child, ...]:
        """The processes, the controller first."""
        return tuple(self._children)

    def start(self) -> None:
        """Start all children. Raises Unavailable when the port is taken, StorageError."""
        self._listen = free_address(self._plan.listen)
        logs, home = self._plan.home / "logs", ["--home", str(self._plan.home)]
        policy = ["--policy", self._plan.policy] if self._plan.policy else []
        journal = ["--journal", str(self._plan.journal)] if self._plan.journal else []
        self._children.append(
            children.start(
                "the controller",
                "mesh.controller",
                ["--listen", self._listen, *home, *policy, *journal],
                logs / "controller.log",
            )
        )
        for node in self._plan.nodes:
            self._children.append(
                children.start(
                    f"node {node.name}",
                    "mesh_nodes",
                    [*self._node_arguments(node), *home],
                    logs / f"node-{node.name}.log",
                )
            )

    def _node_arguments(self, node: NodePlan) -> list[str]:
        arguments = ["--join", self.address, "--name", node.name, "--device", node.device]
        memory_bytes, threads = self._plan.memory_bytes, self._plan.threads
        nodes = self._plan.nodes
        alike = [other for other in nodes if other.device is node.device]
        if node.device is DeviceKind.GPU:
            arguments += ["--gpu", str(alike.index(node))]
            if len(nodes) > 1:
                # A node that is told nothing lets models sleep in half of the host's memory.
                share_bytes = hardware.probe().memory_bytes // 2 // len(nodes)
                arguments += ["--asleep-memory", str(share_bytes)]
        if len(nodes) > 1 and (memory_bytes is None or threads is None):
            machine = hardware.probe()
            if node.device is DeviceKind.CPU:
                memory_bytes = memory_bytes or machine.budget_bytes // len(alike)
            threads = threads or max(1, machine.cores // len(nodes))
        if memory_bytes is not None:
            arguments += ["--memory", str(memory_bytes)]
        if threads is not None:
            arguments += ["--threads", str(threads)]
        journal = self._plan.node_journal(node.name)
        if journal is not None:
            arguments += ["--journal", str(journal)]
        return arguments

    def wait_ready(self, stopping: Callable[[], bool], on_ready: Callable[[str], None]) -> bool:
        """Wait until the controller serves and every node has joined; False when told to stop.

        `on_ready` is called with a line for each of them. Raises MeshError when a child ends, and
        Unavailable when it takes longer than READY_S_MAX.
        """
        waiting = [node.name for node in self._plan.nodes]
        serving = False
        until_s = time.monotonic() + READY_S_MAX
        while not stopping():
            self.check_alive()
            joined = self._joined()
            if joined is not None and not serving:
                serving = True
                on_ready(f"controller  {self.address}")
            for name in [name for name in waiting if name in (joined or ())]:
                waiting.remove(name)
                on_ready(f"node        {name}")
            if serving and not waiting:
                return True
            if time.monotonic() > until_s:
                raise self._late(serving, waiting)
            time.sleep(POLL_S)
        return False

    def _joined(self) -> set[str] | None:
        """The nodes that are ready, or None while the controller does not serve."""
        try:
            # A channel of its own each time: one that was refused would first back off for a while.
            with MeshClient(self.address) as client:
                return {node.node_id for node in client.nodes() if node.state is NodeState.READY}
        except Unavailable:
            return None

    def check_alive(self) -> None:
        """Raises MeshError when a child has ended, after showing the end of its log."""
        for child in self._children:
            if not child.running:
                for line in child.log_tail():
                    output.message(f"  {line}")
                raise MeshError(
                    f"{child.name} {child.fate()}", hint=f"its whole log is {child.log_path}"
                )

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all children; bounded. May be called twice."""
        ended, self._children = self._children, []
        children.stop(ended, hurry)

    def _late(self, serving: bool, waiting: Sequence[str]) -> Unavailable:
        who = f"node {waiting[0]} has not joined" if serving else "the controller does not serve"
        return Unavailable(
            f"{who} after {READY_S_MAX:.0f} s", hint=f"see the logs in {self._plan.home / 'logs'}"
        )
