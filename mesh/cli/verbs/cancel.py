"""`mesh cancel`: end requests before they have ended; their clients are told so."""

import click

from mesh.cli.each import each
from mesh.cli.options import controller_option
from mesh.domain.ids import RequestId
from mesh.wire.client import MeshClient


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@controller_option
@click.pass_context
def cancel(ctx: click.Context, ids: tuple[str, ...], address: str) -> None:
    """End requests, which `mesh requests` lists; their clients are told. Every one is tried."""
    with MeshClient(address) as client:
        each(ctx, ids, lambda one: client.cancel(RequestId(one)), "cancelled")
