"""`mesh delete`: deployments and their instances go; the models stay in the nodes' stores."""

import click

from mesh.cli.each import each
from mesh.cli.options import controller_option
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@controller_option
@click.pass_context
def delete(ctx: click.Context, names: tuple[str, ...], address: str) -> None:
    """Delete deployments. Every one is tried; one that fails makes the command fail."""
    with MeshClient(address) as client:
        each(ctx, names, lambda name: client.delete(DeploymentName(name)), "deleted")
