"""`mesh unload`: instances go, idle ones at once, the others with their last request."""

import click

from mesh.cli.each import each
from mesh.cli.options import controller_option
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@controller_option
@click.pass_context
def unload(ctx: click.Context, names: tuple[str, ...], address: str) -> None:
    """Have the instances of deployments go: idle ones now, the others with their last request."""
    with MeshClient(address) as client:
        each(ctx, names, lambda name: client.unload(DeploymentName(name)), "unloading")
