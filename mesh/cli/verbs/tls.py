"""`mesh tls`: certificates of a cell, from an authority of its own."""

from pathlib import Path

import click

from mesh.cli import output
from mesh.wire.certificates import make_folder

DAYS = 825


@click.group()
def tls() -> None:
    """Make certificates for a cell."""


@tls.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--host",
    "hosts",
    metavar="NAME|ADDRESS",
    multiple=True,
    default=("localhost", "127.0.0.1"),
    show_default=True,
    help="By which the controller is called. Repeat it for several.",
)
@click.option("--days", type=click.IntRange(min=1, max=3650), default=DAYS, show_default=True)
def init(folder: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make an authority in DIR, and certificates of it: of the controller, of nodes, of clients."""
    make_folder(folder, hosts, days)
    output.message(f"{folder}: keep ca.key away from the cell")
