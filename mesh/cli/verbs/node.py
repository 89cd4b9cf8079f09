"""`mesh node`: one node agent in the foreground, as `python -m mesh_nodes` runs it."""

from typing import Any

import click

from mesh.cli.options import program_options
from mesh.runtime.options import as_arguments
from mesh_nodes.main import main as run_node
from mesh_nodes.options import OPTIONS


@click.command()
@program_options(OPTIONS)
@click.pass_context
def node(ctx: click.Context, /, **given: Any) -> None:
    """Run a node agent in the foreground: this machine computes for a cell."""
    ctx.exit(run_node(as_arguments(OPTIONS, given)))
