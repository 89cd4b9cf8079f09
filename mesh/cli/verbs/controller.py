"""`mesh controller`: one controller in the foreground, as `python -m mesh.controller` runs it."""

from typing import Any

import click

from mesh.cli.options import program_options
from mesh.controller.main import main as run_controller
from mesh.controller.options import OPTIONS
from mesh.runtime.options import as_arguments


@click.command()
@program_options(OPTIONS)
@click.pass_context
def controller(ctx: click.Context, /, **given: Any) -> None:
    """Run a cell's controller in the foreground: gateway, admission, placement."""
    ctx.exit(run_controller(as_arguments(OPTIONS, given)))
