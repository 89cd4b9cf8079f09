"""`mesh get`: the cell's deployments, one a line."""

import click

from mesh.cli import output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("name", required=False)
@format_option
@controller_option
def get(name: str | None, form: Format, address: str) -> None:
    """List deployments, or show one."""
    with MeshClient(address) as client:
        found = client.list() if name is None else (client.get(DeploymentName(name)),)
    if form is Format.TABLE:
        phases = (tables.UNDER_WAY,) if any(map(tables.under_way, found)) else ()
        output.table((*tables.DEPLOYMENTS, *phases), found)
    else:
        output.structured(found if name is None else found[0], form)
