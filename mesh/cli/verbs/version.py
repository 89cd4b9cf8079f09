"""`mesh version`."""

import click

from mesh import __version__
from mesh.cli import output


@click.command()
def version() -> None:
    """Print the version of this mesh."""
    output.text(f"mesh {__version__}")
