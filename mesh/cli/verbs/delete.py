"""`mesh delete`: deployments and their instances go; the models stay in the nodes' stores."""

import click

from mesh.cli import output
from mesh.cli.options import controller_option
from mesh.domain.errors import InvalidInput, MeshError, Unavailable
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@controller_option
@click.pass_context
def delete(ctx: click.Context, names: tuple[str, ...], address: str) -> None:
    """Delete deployments. Every one is tried; one that fails makes the command fail."""
    failures: list[MeshError] = []
    with MeshClient(address) as client:
        for name in names:
            try:
                client.delete(DeploymentName(name))
            except Unavailable:
                raise
            except MeshError as error:
                failures.append(error)
                output.error(error)
            else:
                output.message(f"{name}: deleted")
    if failures:
        only_usage = len(failures) == len(names) and all(
            isinstance(error, InvalidInput) for error in failures
        )
        ctx.exit(2 if only_usage else 1)
