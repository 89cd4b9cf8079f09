"""`mesh nodes`: what the cell computes on."""

import click

from mesh.cli import memory_tables, output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.domain.lifecycle import NodeState
from mesh.wire.client import MeshClient


@click.command()
@format_option
@controller_option
def nodes(form: Format, address: str) -> None:
    """List the cell's nodes and the books of their memory."""
    with MeshClient(address) as client:
        found = client.nodes()
    if form is Format.TABLE:
        output.table(tables.NODES, found)
        joined = [node for node in found if node.state is not NodeState.STARTING]
        if joined:
            output.text("")
            output.table(memory_tables.NODE_MEMORY, joined)
        for node in found:
            if node.phase:
                output.message(f"{node.node_id} {node.phase} ({node.share:.0%}) before it joins")
    else:
        output.structured(found, form)
