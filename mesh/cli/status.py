"""`mesh status`: the cell in a few numbers."""

import click

from mesh.cli import output
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.cli.plain import plain
from mesh.domain.views import CellStatus
from mesh.wire.client import MeshClient


@click.command()
@format_option
@controller_option
def status(form: Format, address: str) -> None:
    """Show whether the cell serves, what it holds and what it refused."""
    with MeshClient(address) as client:
        found = client.status()
    if form is Format.TABLE:
        output.fields(_fields(address, found))
    else:
        output.structured(plain(found), form)


def _fields(address: str, status: CellStatus) -> list[tuple[str, str]]:
    refused = ", ".join(f"{reason} {count}" for reason, count in status.refused)
    return [
        ("controller", address),
        ("version", status.version),
        ("uptime_s", f"{status.uptime_s:.1f}"),
        ("nodes_ready", f"{status.nodes_ready} of {status.nodes}"),
        ("deployments", str(status.deployments)),
        ("instances", str(status.instances)),
        ("running", str(status.running)),
        ("queued", str(status.queued)),
        ("served", str(status.served)),
        ("refused", refused or "0"),
        ("state_path", status.state_path),
    ]
