"""A cell on this machine: the controller and its node agents as child processes.

`mesh up` and `mesh demo` start one, wait until it serves, watch it and stop it. It decides what
each child is told (address, home, its share of the machine) and sees who serves; `kept_child` keeps
each of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from mesh.cli import children, output
from mesh.cli.cell_plan import CellPlan, NodePlan, free_address, reached
from mesh.cli.children import Child
from mesh.cli.kept_child import KeptChild
from mesh.cli.progress import Report, progress
from mesh.cli.pulse import Pulse
from mesh.cli.restarts import NO_RESTARTS, RestartLimits
from mesh.cli.stopping import Stopping
from mesh.controller import options as controller
from mesh.controller.state_check import check_restart
from mesh.domain.errors import Forbidden, MeshError, Unauthenticated, Unavailable
from mesh.domain.lifecycle import NodeState
from mesh.domain.reasons import DeviceKind
from mesh.domain.views import NodeSnapshot
from mesh.runtime.options import as_arguments
from mesh.wire.client import MeshClient
from mesh_nodes import hardware
from mesh_nodes.options import OPTIONS

READY_S_MAX = 120.0
"""From the start of the children, or from the last news of the controller or node that is waited
for, until it serves. An engine's import takes seconds.
"""
ALL_READY_S_MAX = 3600.0
"""From the start of the children until all serve, however much they get on: what a node measures
before it joins takes minutes.
"""
POLL_S = 0.1
ANSWER_S_MAX = 2.0
"""For a controller that is asked for its nodes; meanwhile nobody looks whether Ctrl-C was pressed.
It is asked again at the next look.
"""


class LocalCell:
    """Owns the child processes from `start` to `stop`. A child that ends is started again within
    the limits of `restarts`; unless they are given, it ends the cell.
    """

    def __init__(self, plan: CellPlan, restarts: RestartLimits = NO_RESTARTS) -> None:
        self._plan = plan
        self._restarts = restarts
        self._listen = plan.listen
        self._http = plan.http
        self._kept: list[KeptChild] = []
        self._starting: dict[str, NodeSnapshot] = {}
        """Nodes that have told what they do before they join, at the last look."""
        self._pulse: Pulse | None = None
        """The pulse of the controller while it serves."""

    @property
    def address(self) -> str:
        """Where clients on this machine reach the controller."""
        return reached(self._listen)

    @property
    def http_address(self) -> str | None:
        """Where clients of OpenAI's protocol on this machine reach it, if they can."""
        return None if self._http is None else reached(self._http)

    @property
    def children(self) -> tuple[Child, ...]:
        """The processes that there are, the controller first."""
        return tuple(kept.process for kept in self._kept if kept.process is not None)

    def start(self) -> None:
        """Start all children. Raises Unavailable when the port is taken, StorageError."""
        self._listen = free_address(self._plan.listen)
        if self._plan.http is not None:
            self._http = free_address(self._plan.http, "--http")
        given = {
            option.name: getattr(self._plan, option.name, None) for option in controller.OPTIONS
        }
        given |= {"listen": self._listen, "http": self._http}
        arguments = as_arguments(controller.OPTIONS, given)
        self._keep("the controller", "mesh.controller", arguments)
        for node in self._plan.nodes:
            arguments = self._node_arguments(node)
            self._keep(f"node {node.name}", "mesh_nodes", arguments, node.name, node.cpus)

    def _keep(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        node: str | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        log_path = self._plan.home / "logs" / f"{f'node-{node}' if node else 'controller'}.log"

        def begin(again: bool) -> Child:
            if again and node is None:
                check_restart(self._plan.home)
            with children.bound(cpus):
                return children.start(name, module, arguments, log_path, again=again)

        self._kept.append(KeptChild(name, begin, self._restarts, node))

    def _node_arguments(self, node: NodePlan) -> list[str]:
        gpu = asleep_bytes = None
        memory_bytes = node.memory_bytes or self._plan.memory_bytes
        threads = self._plan.threads
        nodes = self._plan.nodes
        alike = [other for other in nodes if other.device is node.device]
        page_cache_bytes = self._plan.page_cache_bytes
        if node.device is DeviceKind.GPU:
            gpu = alike.index(node)
            if len(nodes) > 1:
                # A node that is told nothing lets models sleep in half of the host's memory.
                asleep_bytes = hardware.probe().memory_bytes // 2 // len(nodes)
        if node.numa is None and len(nodes) > 1 and (memory_bytes is None or threads is None):
            machine = hardware.probe()
            if node.device is DeviceKind.CPU:
                memory_bytes = memory_bytes or machine.budget_bytes // len(alike)
                if page_cache_bytes is None:
                    # A node that is told nothing takes half of what it alone leaves.
                    left_bytes = max(machine.memory_bytes - memory_bytes * len(alike), 0)
                    page_cache_bytes = left_bytes // 2 // len(alike)
            threads = threads or max(1, machine.cores // len(nodes))
        plain = node.device is DeviceKind.CPU and node.engine is None
        return as_arguments(
            OPTIONS,
            {
                "join": self.address,
                "name": node.name,
                "device": node.device,
                "gpu": gpu,
                "engine": node.engine,
                "memory": memory_bytes,
                "prefetch_memory": self._plan.prefetch_bytes,
                "page_cache": page_cache_bytes if plain else None,
                "threads": threads,
                "numa": node.numa,
                "precision": self._plan.precision if plain else None,
                "kv": self._plan.kv if plain else None,
                "asleep_memory": asleep_bytes,
                "sources": tuple(self._plan.sources),
                "tls": self._plan.tls,
                # A turn rule is code that every node needs; a policy by name is on all of them.
                "policy": policy if (policy := self._plan.policy or "").endswith(".py") else None,
                "journal": self._plan.node_journal(node.name),
                "home": self._plan.home,
            },
        )

    def wait_ready(self, stopping: Callable[[], bool], on_ready: Callable[[str], None]) -> bool:
        """Wait until the controller serves and every node has joined; False when told to stop.

        `on_ready` is called with a line or two for each of them; what a node does before it joins
        is shown as progress. Raises as `check_alive` does, and Unavailable when one of them does
        not get on for READY_S_MAX, or when not all are there after ALL_READY_S_MAX.
        """
        waiting = list(self._kept)
        began_s = time.monotonic()
        # When each was last seen to get on, as it does slowly on a busy machine, and what it said.
        heard: dict[KeptChild, tuple[float, object]] = dict.fromkeys(waiting, (began_s, None))
        with ExitStack() as drawn:
            show: Report | None = None
            while not stopping():
                self.check_alive()
                for kept in [kept for kept in waiting if kept.serving]:
                    waiting.remove(kept)
                    drawn.close()  # a bar and lines would cross each other
                    show = None
                    for line in self._ready_lines(kept):
                        on_ready(line)
                if not waiting:
                    return True
                now_s = time.monotonic()
                if now_s - began_s > ALL_READY_S_MAX:
                    raise self._late(waiting[0], ALL_READY_S_MAX)
                for kept in waiting:
                    node = self._starting.get(kept.node or "")
                    said = node and (node.phase, node.share)
                    if said != heard[kept][1]:
                        heard[kept] = now_s, said
                    elif now_s - heard[kept][0] > READY_S_MAX:
                        raise self._late(kept, READY_S_MAX)
                for name, node in sorted(self._starting.items())[:1]:
                    show = show or drawn.enter_context(progress("cell"))
                    show(f"node {name} {node.phase}", node.share)
                time.sleep(POLL_S)
        return False

    def _ready_lines(self, kept: KeptChild) -> Iterator[str]:
        if kept.node:
            yield f"node        {kept.node}"
        else:
            yield f"controller  {self.address}"
            if self.http_address:
                scheme = "https" if self._plan.tls else "http"
                yield f"http        {scheme}://{self.http_address}/v1"
                if not self._plan.no_page:
                    yield f"page        {scheme}://{self.http_address}/"

    def check_alive(self) -> None:
        """See who has ended and who serves; start again what is to be. For one thread alone.

        Raises MeshError when a child has ended for good, after showing the end of its log.
        """
        now_s = time.monotonic()
        for kept in self._kept:
            kept.look(now_s)
        amiss = [kept for kept in self._kept if not kept.serving]
        if amiss:
            joined = self._joined() if self._kept[0].process else None
            for kept in amiss:
                answers = joined is not None and (kept.node is None or kept.node in joined)
                kept.follow(now_s, answers=answers)
        self._feel_pulse(now_s)

    def _feel_pulse(self, now_s: float) -> None:
        if not self._kept[0].serving:
            self._forget_pulse()
        elif self._pulse is None:
            self._pulse = Pulse(self.address, now_s, output.message)
        else:
            self._pulse.look(now_s)

    def _forget_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def _joined(self) -> set[str] | None:
        """The nodes that the cell has, or None while the controller does not serve. Raises
        Unauthenticated or Forbidden where this process may not look.
        """
        try:
            # A channel of its own each time: one that was refused would first back off for a while.
            with MeshClient(self.address, answer_s_max=ANSWER_S_MAX) as client:
                nodes = client.nodes()
        except (Unauthenticated, Forbidden) as error:
            error.hint = "MESH_KEY is to be an operator's: `mesh key create --role admin`"
            raise
        except MeshError:
            # Also one that it had no time to name: it may be killed amid the answer.
            return None
        self._starting = {n.node_id: n for n in nodes if n.state is NodeState.STARTING}
        gone = (NodeState.LOST, NodeState.STARTING)
        return {node.node_id for node in nodes if node.state not in gone}

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all children; bounded. May be called twice."""
        self._forget_pulse()
        processes, self._kept = self.children, []
        children.stop(processes, hurry)

    def _late(self, late: KeptChild, after_s: float) -> Unavailable:
        who = f"{late.name} has not joined" if late.node else "the controller does not serve"
        return Unavailable(
            f"{who} after {after_s:.0f} s", hint=f"see the logs in {self._plan.home / 'logs'}"
        )


@contextmanager
def running_cell(
    plan: CellPlan, stopping: Stopping, on_ready: Callable[[str], None] = lambda line: None
) -> Iterator[LocalCell]:
    """Its nodes have joined; `on_ready` hears a line for each part.

    Raises KeyboardInterrupt when stopped before that, MeshError when a part does not start.
    """
    cell = LocalCell(plan)
    try:
        cell.start()
        if not cell.wait_ready(stopping.asked, on_ready):
            raise KeyboardInterrupt
        yield cell
    finally:
        cell.stop(stopping.asked_again)
