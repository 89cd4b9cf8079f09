"""`mesh nodes`: what the cell computes on."""

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.cli.plain import plain
from mesh.wire.client import MeshClient


@click.command()
@format_option
@controller_option
def nodes(form: Format, address: str) -> None:
    """List the cell's nodes with their memory and instances."""
    with MeshClient(address) as client:
        found = client.nodes()
    if form is Format.TABLE:
        output.table(tables.NODES, tables.node_rows(found))
    else:
        output.structured(plain(found), form)
