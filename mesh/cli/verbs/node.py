"""`mesh node`: one node agent in the foreground, as `python -m mesh_nodes` runs it."""

from typing import Any

import click

from mesh.cli.options import home_option, node_options
from mesh_nodes.main import main as run_node
from mesh_nodes.options import OPTIONS, as_arguments


@click.command()
@node_options(*(option.name for option in OPTIONS))
@home_option
@click.pass_context
def node(ctx: click.Context, /, **given: Any) -> None:
    """Run a node agent in the foreground: this machine computes for a cell."""
    ctx.exit(run_node(as_arguments(given)))
