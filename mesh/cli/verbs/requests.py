"""`mesh requests`: what is being answered, one a line."""

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.wire.client import MeshClient


@click.command()
@format_option
@controller_option
def requests(form: Format, address: str) -> None:
    """List the requests whose clients wait, the oldest first."""
    with MeshClient(address) as client:
        found = client.requests()
    if form is Format.TABLE:
        output.table(tables.REQUESTS, found)
    else:
        output.structured(found, form)
