"""`mesh load`: instances ahead of the first call."""

import click

from mesh.cli.each import each
from mesh.cli.options import controller_option
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@controller_option
@click.pass_context
def load(ctx: click.Context, names: tuple[str, ...], address: str) -> None:
    """Begin to load an instance of each deployment, unless it has one; `mesh wait` waits for it."""
    with MeshClient(address) as client:
        each(ctx, names, lambda name: client.load(DeploymentName(name)), "loading, or loaded")
