"""`mesh up`: a cell on this machine until Ctrl-C, with the controller and its nodes as children.

A child that ends is started again, and the others go on; one that cannot start ends the cell.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mesh.cli import output
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import CellPlan, on_numa_nodes, plan_nodes
from mesh.cli.options import DEFAULT_ADDRESS, program_options
from mesh.cli.restarts import RestartLimits
from mesh.cli.stopping import Stopping
from mesh.controller import options as controller
from mesh.controller.state_check import check_state
from mesh.domain.errors import HOME_HINT, StorageError, Unavailable, system_errors
from mesh.domain.source_rules import read_source_rules
from mesh.domain.units import parse_bytes
from mesh.wire.certificates import Part, read_tls
from mesh.wire.credentials import credentials, show
from mesh_nodes import options as node
from mesh_nodes import topology

FILE_NAME = "up.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """Hold the lock for the block. Raises Unavailable, which says who holds it, and StorageError.

    On a file system without locks nobody is kept out.
    """
    path = home / FILE_NAME
    with system_errors(StorageError, f"cannot write {path}", HOME_HINT):
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            raise Unavailable(
                f"`mesh up` runs already with the state folder {home}: process {holder or '?'}",
                hint="use that cell, or stop it first; --home DIR starts another one beside it",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError(f"cannot lock {path}: {error.strerror}") from error
        with suppress(OSError):  # a full disk keeps the number from being told, not the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


WATCH_S = 0.2
"""How often the children are looked after."""
_OF_NODES = ("memory", "prefetch_memory", "page_cache", "threads", "precision", "kv")
_HELP = {
    "listen": "Where the controller listens. Port 0 picks a free one.",
    "keys": "Each call needs a key; MESH_KEY is an operator's.",
    "open": "As of `mesh controller`: none needs a key.",
    "tls": "Certificates of the controller, nodes and clients, as of `mesh tls init DIR`.",
}
"""Where an option of the controller says more for a cell."""


@click.command()
@click.option(
    "--node",
    "wanted",
    metavar="DEVICE[=NAME]",
    multiple=True,
    default=("cpu",),
    show_default="cpu",
    help="A node to start: cpu or gpu. Repeat it for several.",
)
@program_options(option for option in node.OPTIONS if option.name in _OF_NODES)
@click.option("--numa", is_flag=True, help="A CPU node on each NUMA node, near its memory.")
@program_options(
    replace(option, help=_HELP[option.name]) if option.name in _HELP else option
    for option in controller.OPTIONS
    if option.name not in ("turn", "journal", "state", "grace_s", "nodes_wanted")
)
def up(
    wanted: tuple[str, ...],
    memory: str | None,
    prefetch_memory: str | None,
    page_cache: str | None,
    numa: bool,
    http: str,
    tls: str | None,
    home: Path,
    **given: Any,
) -> None:
    """Start a cell on this machine: a controller and its nodes. Ctrl-C stops all of it."""
    read_source_rules(given["sources"])
    certificates = Path(tls) if tls else None
    if certificates is not None:
        show(replace(credentials(), tls=read_tls(certificates, Part.CLIENT)))
    nodes = plan_nodes(wanted)
    if numa:
        there = topology.numa_nodes(topology.usable_cpus())
        nodes = on_numa_nodes(nodes, [node.number for node in there])
    plan = CellPlan(
        http=None if http == controller.HTTP_OFF else http,
        home=home,
        nodes=nodes,
        memory_bytes=None if memory is None else parse_bytes(memory),
        prefetch_bytes=None if prefetch_memory is None else parse_bytes(prefetch_memory),
        page_cache_bytes=None if page_cache is None else parse_bytes(page_cache),
        tls=certificates,
        **given,
    )
    cell = LocalCell(plan, RestartLimits())
    with locked_home(home), Stopping() as stopping:
        try:
            check_state(home)
            cell.start()
            if cell.wait_ready(stopping.asked, output.text):
                by = "" if certificates is None else f"--tls {certificates} "
                at = "" if cell.address == DEFAULT_ADDRESS else f" --controller {cell.address}"
                output.text(f"next        mesh {by}deploy MODEL.yaml{at}")
                while not stopping.wait(WATCH_S):
                    cell.check_alive()
            output.message("stopping")
        finally:
            cell.stop(stopping.asked_again)
