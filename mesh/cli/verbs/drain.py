"""`mesh drain`: a node takes no new work, so that it can be stopped without hurting a request."""

import time

import click

from mesh.cli import output
from mesh.cli.options import controller_option, timeout_option
from mesh.cli.progress import progress
from mesh.domain.errors import Cancelled, NotFound
from mesh.domain.ids import NodeId
from mesh.wire.client import MeshClient

POLL_S = 0.2


@click.command()
@click.argument("name", metavar="NODE")
@click.option("--undo", is_flag=True, help="Let the node take new work again.")
@click.option("--wait", is_flag=True, help="Wait until nothing is loaded on it any more.")
@timeout_option(300.0, "How long --wait waits.")
@controller_option
def drain(name: str, undo: bool, wait: bool, timeout_s: float, address: str) -> None:
    """Give a node no new work; what runs on it moves to others, or ends as usual."""
    if undo and wait:
        raise click.UsageError("--undo and --wait exclude each other")
    with MeshClient(address) as client:
        client.drain(NodeId(name), undo=undo)
        if wait:
            _wait_empty(client, name, timeout_s)
    output.message(f"{name}: {'takes work again' if undo else 'empty' if wait else 'draining'}")


def _wait_empty(client: MeshClient, name: str, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    with progress(name) as report:
        while True:
            node = next((node for node in client.nodes() if node.node_id == name), None)
            if node is None:
                raise NotFound(f"node {name} has left the cell")
            if not node.instances:
                return
            running = sum(instance.batch for instance in node.instances)
            report(f"{len(node.instances)} instances, {running} requests left", 0.0)
            if time.monotonic() > until_s:
                raise Cancelled(
                    f"node {name} still has {len(node.instances)} instances after {timeout_s:g} s",
                    hint="it goes on draining; wait longer with --timeout",
                )
            time.sleep(POLL_S)
