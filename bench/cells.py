"""A cell on this machine, for benchmarks that measure the whole system."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.demo_model import store_path
from mesh.cli import children
from mesh.cli.cell import LocalCell, running_cell
from mesh.cli.cell_plan import CellPlan, NodePlan, plan_nodes
from mesh.cli.stopping import Stopping
from mesh.cli.waiting import Goal, wait_for
from mesh.controller.keys import KeyBook
from mesh.domain.access import Role, TenantName
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.ids import DeploymentName, NodeId
from mesh.domain.profile import Profile
from mesh.wire.client import MeshClient
from mesh.wire.credentials import KEY_VARIABLE, Credentials, credentials, show
from mesh_nodes.topology import siblings, usable_cpus

MESH = (sys.executable, "-c", "from mesh.cli.main import main; main()")
"""The command, in this environment."""
LOADED_S_MAX = 180.0
CALM_SHARE = 0.1
"""A node that uses less than this share of a core has computed all that it computes for nobody."""
CALM_S, CALM_S_MAX = 1.0, 600.0


def nodes_apart(count: int) -> tuple[NodePlan, ...]:
    """So many CPU nodes, each with an equal part of the cores for itself. Raises InvalidInput where
    the cores do not divide.
    """
    cpus = usable_cpus()
    cores = sorted({siblings(cpu) & cpus for cpu in cpus}, key=min)
    size, left = divmod(len(cores), count)
    if left:
        raise InvalidInput(
            f"{len(cores)} cores cannot be divided into {count} equal parts",
            hint="give it a number of cores that can: `taskset -c`",
        )
    parts = [frozenset().union(*cores[n * size : (n + 1) * size]) for n in range(count)]
    nodes = plan_nodes(["cpu"] * count)
    return tuple(replace(node, cpus=part) for node, part in zip(nodes, parts, strict=True))


@contextmanager
def local_cell(
    *,
    home: Path | None = None,
    store: Path | None = None,
    nodes: Sequence[NodePlan] = plan_nodes(["cpu"]),
    join_ms: float = 0.0,
    **plan: Any,
) -> Iterator[LocalCell]:
    """One controller and its nodes, one CPU node unless given, with their state in `home`, or in a
    folder of their own, and their models in `store`, or in the usual one. `plan` has what else a
    `CellPlan` says; for `keys` see `keys_shown`.

    Once they serve, a signal to stop raises KeyboardInterrupt. Raises MeshError when a part of it
    does not start.
    """
    with ExitStack() as opened:
        if home is None:
            home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        if not (home / "store").exists():
            (home / "store").symlink_to(store or store_path())
        made = CellPlan(
            listen="127.0.0.1:0", home=home, nodes=tuple(nodes), join_ms=join_ms, **plan
        )
        stopping = opened.enter_context(Stopping())
        cell = opened.enter_context(running_cell(made, stopping))
        with stopping.interrupting():
            yield cell


@contextmanager
def scripted_cell(*, step_s: float = 0.0, **plan: Any) -> Iterator[LocalCell]:
    """A cell whose only node has no engine: an iteration takes so long, and computes nothing. For
    `plan` see `local_cell`, whose errors it raises.
    """
    with ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        cell = opened.enter_context(local_cell(nodes=(), home=home, **plan))
        node = ("--join", cell.address, "--name", "scripted", "--home", str(home))
        arguments = ("--step-s", str(step_s), "--", *node)
        log = home / "logs" / "node-scripted.log"
        started = children.start("the node", "tests.support.scripted_node", arguments, log)
        opened.callback(children.stop, [started])
        with MeshClient(cell.address) as client:
            wait_until(lambda: bool(client.nodes()), "the node has not joined", cell=cell)
        yield cell


@contextmanager
def shown(key: str) -> Iterator[None]:
    """This key, by the clients that dial meanwhile."""
    before = credentials()
    show(Credentials(key=key))
    try:
        yield
    finally:
        show(before)


@contextmanager
def keys_shown(home: Path) -> Iterator[None]:
    """An operator's key for a cell with this home, shown by this process and its children."""
    with closing(KeyBook(home / "controller")) as book:
        secret, _ = book.create(Role.ADMIN, TenantName(""))
    os.environ[KEY_VARIABLE] = secret
    try:
        with shown(secret):
            yield
    finally:
        del os.environ[KEY_VARIABLE]


def deployed(address: str, specs: Sequence[DeploymentSpec]) -> None:
    """One instance of each, loaded, and kept.

    Raises Cancelled when that takes too long.
    """
    scaling = Scaling(replicas_min=1, replicas_max=1, keep_alive_s=600.0)
    with MeshClient(address) as client:
        kept = [replace(spec, scaling=scaling) for spec in specs]
        for spec in kept:
            client.deploy(spec)
        for spec in kept:
            wait_for(client, spec.name, Goal.READY, LOADED_S_MAX)


def measured_profile(
    address: str, name: DeploymentName, told: Callable[[str], None], node_id: NodeId | None = None
) -> Profile:
    """Measure a deployment's model, on this node or on any, for the cell to use from now on. Raises
    MeshError.
    """
    with MeshClient(address) as client:
        client.profile(
            name, node_id, progress=lambda phase, share: told(f"{phase}: {100 * share:.0f} %")
        )
        for view in client.profiles(name):
            if view.profile.measured and (node_id is None or node_id in view.nodes):
                return view.profile
    raise MeshError("the cell has no measured profile after measuring one")


def wait_until(
    done: Callable[[], bool],
    what: str,
    s_max: float = LOADED_S_MAX,
    *,
    cell: LocalCell | None = None,
    poll_s: float = 0.05,
) -> float:
    """Seconds until something is so, of which `what` says that it is not. Raises Unavailable when
    it takes longer, and when a part of the cell ends.
    """
    begun_s = time.monotonic()
    while not done():
        if cell is not None:
            cell.check_alive()
        if time.monotonic() - begun_s > s_max:
            raise Unavailable(f"{what} after {s_max:.0f} s")
        time.sleep(poll_s)
    return time.monotonic() - begun_s


def wait_calm(cell: LocalCell) -> None:
    """Until its nodes are idle: new instances compute many sizes once. Raises MeshError."""
    nodes = [psutil.Process(child.process.pid) for child in cell.children[1:]]
    wait_until(
        lambda: all(node.cpu_percent(CALM_S) <= 100 * CALM_SHARE for node in nodes),
        "a node is not idle",
        CALM_S_MAX,
        poll_s=0.0,
    )


def replay_said(command: Sequence[str], s_max: float) -> dict[str, Any]:
    """What a replay's JSON says. Raises MeshError where it says nothing, or not how many calls the
    controller has counted.
    """
    ran = subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=s_max,
    )
    if not ran.stdout:
        raise MeshError(f"a replay ended with {ran.returncode}: {ran.stderr.strip()[-2000:]}")
    made: dict[str, Any] = json.loads(ran.stdout)
    if made["counts_difference"] is None:
        raise MeshError("the controller's own counts are not to be had")
    return made
