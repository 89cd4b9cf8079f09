"""`mesh up`: a cell on this machine until Ctrl-C, with the controller and its nodes as children.

A child that ends is started again, and the others go on; one that cannot start ends the cell.
"""

from dataclasses import replace
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.cell import LocalCell
from mesh.cli.cell_plan import CellPlan, on_numa_nodes, plan_nodes
from mesh.cli.home_lock import locked_home
from mesh.cli.options import (
    DEFAULT_ADDRESS,
    HTTP_OFF,
    home_option,
    http_cors_option,
    http_hosts_option,
    http_option,
    join_option,
    no_page_option,
    node_options,
    policy_option,
    sources_option,
)
from mesh.cli.restarts import RestartLimits
from mesh.cli.stopping import Stopping
from mesh.controller.state_check import check_state
from mesh.domain.units import parse_bytes
from mesh.wire.certificates import Part, read_tls
from mesh.wire.credentials import TLS_VARIABLE, credentials, show
from mesh_nodes import topology

WATCH_S = 0.2
"""How often the children are looked after."""


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
@node_options("memory", "prefetch_memory", "page_cache", "threads", "precision", "kv")
@click.option("--numa", is_flag=True, help="A CPU node on each NUMA node, near its memory.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="Where the controller listens. Port 0 picks a free one.",
)
@click.option("--keys", is_flag=True, help="Each call needs a key; MESH_KEY is an operator's.")
@click.option("--open", "open_", is_flag=True, help="As of `mesh controller`: none needs a key.")
@click.option(
    "--tls",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=TLS_VARIABLE,
    help="Certificates of the controller, nodes and clients, as of `mesh tls init DIR`.",
)
@http_option
@http_hosts_option
@http_cors_option
@no_page_option
@join_option
@sources_option
@policy_option
@home_option
def up(
    wanted: tuple[str, ...],
    memory: str | None,
    prefetch_memory: str | None,
    page_cache: str | None,
    threads: int | None,
    numa: bool,
    precision: str,
    kv: str,
    listen: str,
    keys: bool,
    open_: bool,
    tls: Path | None,
    http: str,
    http_hosts: tuple[str, ...],
    http_origins: tuple[str, ...],
    no_page: bool,
    join_ms: float,
    sources: tuple[str, ...],
    policy: str | None,
    home: Path,
) -> None:
    """Start a cell on this machine: a controller and its nodes. Ctrl-C stops all of it."""
    if tls is not None:
        show(replace(credentials(), tls=read_tls(tls, Part.CLIENT)))
    nodes = plan_nodes(wanted)
    if numa:
        there = topology.numa_nodes(topology.usable_cpus())
        nodes = on_numa_nodes(nodes, [node.number for node in there])
    plan = CellPlan(
        listen=listen,
        http=None if http == HTTP_OFF else http,
        http_hosts=http_hosts,
        http_origins=http_origins,
        page=not no_page,
        home=home,
        nodes=nodes,
        memory_bytes=None if memory is None else parse_bytes(memory),
        prefetch_bytes=None if prefetch_memory is None else parse_bytes(prefetch_memory),
        page_cache_bytes=None if page_cache is None else parse_bytes(page_cache),
        threads=threads,
        precision=precision,
        kv=kv,
        policy=policy,
        join_ms=join_ms,
        sources=sources,
        keys=keys,
        open=open_,
        tls=tls,
    )
    cell = LocalCell(plan, RestartLimits())
    with locked_home(home), Stopping() as stopping:
        try:
            check_state(home)
            cell.start()
            if cell.wait_ready(stopping.asked, output.text):
                output.text(f"next        mesh {_by(tls)}deploy MODEL.yaml{_at(cell.address)}")
                while not stopping.wait(WATCH_S):
                    cell.check_alive()
            output.message("stopping")
        finally:
            cell.stop(stopping.asked_again)


def _by(tls: Path | None) -> str:
    return "" if tls is None else f"--tls {tls} "


def _at(address: str) -> str:
    return "" if address == DEFAULT_ADDRESS else f" --controller {address}"
