"""`mesh front`: one front in the foreground, as `python -m mesh.front` runs it."""

from typing import Any

import click

from mesh.cli.options import program_options
from mesh.front.main import main as run_front
from mesh.front.options import OPTIONS
from mesh.runtime.options import as_arguments


@click.command()
@program_options(OPTIONS)
@click.pass_context
def front(ctx: click.Context, /, **given: Any) -> None:
    """Run a front in the foreground: every protocol, before several cells."""
    ctx.exit(run_front(as_arguments(OPTIONS, given)))
