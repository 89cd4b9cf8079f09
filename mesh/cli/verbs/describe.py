"""`mesh describe`: everything about one deployment."""

import click

from mesh.cli import memory_tables, output, tables
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("name")
@format_option
@controller_option
def describe(name: str, form: Format, address: str) -> None:
    """Show one deployment in full: limits, model, instances and how they keep up."""
    with MeshClient(address) as client:
        found = client.get(DeploymentName(name))
    if form is not Format.TABLE:
        output.structured(found, form)
        return
    output.fields(tables.deployment_fields(found))
    if found.instances:
        output.text("")
        output.table(tables.INSTANCES, found.instances)
        output.text("")
        output.table(memory_tables.KV_CACHES, found.instances)
        output.text("")
        output.table(tables.PACE, found.instances)
