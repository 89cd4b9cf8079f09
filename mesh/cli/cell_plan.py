"""What a cell on this machine is to be: its nodes, its home, its share of the machine, its address.

`up` and `demo` make the plan from what the user wrote; `cell` carries it out.
"""

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mesh.domain.checks import check_name
from mesh.domain.errors import InvalidInput, Unavailable, system_errors
from mesh.domain.reasons import DeviceKind
from mesh.domain.values import dataclass
from mesh.runtime.options import AUTO
from mesh.wire.channel import format_address, parse_address

NODES_MAX = 64
REACHED_S_MAX = 2.0
"""Within this machine a connection takes microseconds."""
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What listens on every address is reached from here on the loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What one node of the cell is to be. `None` stands for the device's own engine and for the
    cell's part of the memory.
    """

    name: str
    device: DeviceKind
    engine: str | None = None
    memory_bytes: int | None = None
    numa: int | None = None
    """The NUMA node whose CPUs and memory it has for itself."""
    cpus: frozenset[int] | None = None
    """The logical CPUs that it may compute on; `None` stands for those of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """What a cell is to be. `memory_bytes` and `threads` are one node's, as is `prefetch_bytes` of
    its memory, and `page_cache_bytes` beside it; None: its share. What goes to the controller as it
    is has the name of its option, where it is described.
    """

    listen: str
    home: Path
    nodes: tuple[NodePlan, ...]
    memory_bytes: int | None = None
    prefetch_bytes: int | None = None
    page_cache_bytes: int | None = None
    threads: int | None = None
    precision: str = AUTO
    """As of nodes that compute by openvino; so is `kv`."""
    kv: str = AUTO
    policy: str | None = None
    http: str | None = None
    """Where HTTP is served, if it is."""
    http_host_allowed: tuple[str, ...] = ()
    http_cors: tuple[str, ...] = ()
    no_page: bool = False
    join_ms: float | None = None
    sources: tuple[str, ...] = ()
    """Nodes get them, too."""
    keys: bool = False
    """Where each call needs one, an operator's is in the environment, which the nodes show."""
    open: bool = False
    tls: Path | None = None
    """A folder with certificates of all parts, where they show any."""
    state: str | None = None
    """The address of the registry, where that is in PostgreSQL."""
    journal: Path | None = None
    """The file of the controller's decisions."""
    node_journals: Path | None = None
    """A folder for journals of the nodes' decisions; see `node_journal`."""

    def node_journal(self, name: str) -> Path | None:
        """Where the node of this name writes its decisions."""
        return None if self.node_journals is None else self.node_journals / f"{name}.journal"


def on_numa_nodes(nodes: Sequence[NodePlan], numbers: Sequence[int]) -> tuple[NodePlan, ...]:
    """In place of the one CPU node one on each of these NUMA nodes, named after it: `cpu0`, `cpu1`,
    …, or as it is with the number behind.

    Raises InvalidInput where more CPU nodes are wanted or none, another node has such a name, or
    there is no NUMA node.
    """
    if not numbers:
        raise InvalidInput(
            "--numa: the kernel tells of no NUMA node that this process may compute on",
            hint="leave it out: one node takes the whole machine",
        )
    cpu_nodes = sum(node.device is DeviceKind.CPU for node in nodes)
    if cpu_nodes != 1:
        raise InvalidInput(
            f"--numa starts a CPU node on each NUMA node in place of one, and {cpu_nodes} are "
            "wanted",
            hint="write --node cpu once, or leave --numa out",
        )
    found: list[NodePlan] = []
    for node in nodes:
        if node.device is not DeviceKind.CPU:
            found.append(node)
            continue
        label = node.name.rstrip("0123456789") or node.name
        found += [replace(node, name=f"{label}{n}", numa=n) for n in numbers]
    _check_names(found)
    return tuple(found)


def plan_nodes(wanted: Sequence[str]) -> tuple[NodePlan, ...]:
    """Nodes from `cpu`, `cpu=NAME`, …; those without a name get cpu0, cpu1, …

    Raises InvalidInput for an unknown device, a name that cannot be one, or a name given twice.
    """
    if len(wanted) > NODES_MAX:
        raise InvalidInput(f"{len(wanted)} nodes, more than the {NODES_MAX} of one machine")
    pairs = [entry.partition("=") for entry in wanted]
    taken = {name for _, _, name in pairs if name}
    plans: list[NodePlan] = []
    for kind, equals, name in pairs:
        if kind not in tuple(DeviceKind) or (equals and not name):
            known = ", ".join(DeviceKind)
            raise InvalidInput(
                f"--node {kind}{equals}{name}: no such node (known devices: {known})",
                hint="write --node cpu or --node cpu=NAME, once for each node",
            )
        chosen = name or next(
            free for free in (f"{kind}{n}" for n in range(NODES_MAX + 1)) if free not in taken
        )
        check_name(chosen, "a node's name")
        taken.add(chosen)
        plans.append(NodePlan(name=chosen, device=DeviceKind(kind)))
    _check_names(plans)
    return tuple(plans)


def _check_names(plans: Sequence[NodePlan]) -> None:
    names = [plan.name for plan in plans]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput(
                f"two nodes are named {name}", hint="give every node a name of its own"
            )


def free_address(listen: str, option: str = "--listen") -> str:
    """The address with a port that nothing listens on: port 0 picks one. `option` is that by which
    it was given.

    Raises Unavailable when it is taken, cannot be this machine's, or is not reached from it, as
    where its loopback interface is down.
    """
    host, port = parse_address(listen)
    hint = f"stop what listens there, or choose another address with {option}"
    with system_errors(Unavailable, f"cannot listen on {listen}", hint):
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
            free = format_address(host, probe.getsockname()[1])
            _check_reached(free)
            return free


def reached(listen: str) -> str:
    """Where this machine reaches what listens there."""
    host, port = parse_address(listen)
    return format_address(_REACHED_AT.get(host, host), port)


def _check_reached(listen: str) -> None:
    hint = "bring the loopback interface up: `ip link set lo up`"
    with (
        system_errors(Unavailable, f"this machine does not reach {listen} itself", hint),
        socket.create_connection(parse_address(reached(listen)), timeout=REACHED_S_MAX),
    ):
        pass
