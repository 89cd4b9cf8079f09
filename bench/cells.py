"""A cell on this machine, for benchmarks that measure the whole system."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from bench.demo_model import store_path
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import CellPlan, plan_nodes
from mesh.cli.running_cell import running_cell
from mesh.cli.stopping import Stopping
from mesh.cli.verbs.deploy import wait_ready
from mesh.domain.deployment import DeploymentSpec, Scaling
from mesh.wire.client import MeshClient

MESH = (sys.executable, "-c", "from mesh.cli.main import main; main()")
"""The command, in this environment."""
LOADED_S_MAX = 180.0


@contextmanager
def local_cell(
    *,
    threads: int | None = None,
    policy: str | None = None,
    memory_bytes: int | None = None,
    journal: Path | None = None,
    node_journals: Path | None = None,
    home: Path | None = None,
) -> Iterator[LocalCell]:
    """One controller and one CPU node, with their state in `home`, or in a folder of their own; the
    node computes on `threads` cores in `memory_bytes`, all of them and most of it unless given, and
    the controller decides by `policy`, or by its default. They write their decisions to `journal`
    and into the folder `node_journals`.

    Raises MeshError when a part of it does not start.
    """
    with ExitStack() as opened:
        if home is None:
            home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        if not (home / "store").exists():
            (home / "store").symlink_to(store_path())
        plan = CellPlan(
            listen="127.0.0.1:0",
            home=home,
            nodes=plan_nodes(["cpu"]),
            threads=threads,
            policy=policy,
            memory_bytes=memory_bytes,
            journal=journal,
            node_journals=node_journals,
        )
        stopping = opened.enter_context(Stopping())
        yield opened.enter_context(running_cell(plan, stopping))


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
            wait_ready(client, spec, LOADED_S_MAX)
