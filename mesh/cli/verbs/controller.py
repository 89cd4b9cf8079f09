"""`mesh controller`: one controller in the foreground, as `python -m mesh.controller` runs it."""

from typing import Any

import click

from mesh.cli import output
from mesh.cli.options import controller_option, program_options
from mesh.controller.main import main as run_controller
from mesh.controller.options import OPTIONS
from mesh.runtime.options import as_arguments
from mesh.wire.client import MeshClient


@click.group(invoke_without_command=True)
@program_options(OPTIONS)
@click.pass_context
def controller(ctx: click.Context, /, **given: Any) -> None:
    """Run a cell's controller in the foreground: gateway, admission, placement."""
    if ctx.invoked_subcommand is None:
        ctx.exit(run_controller(as_arguments(OPTIONS, given)))


@controller.command()
@controller_option
def step_down(address: str) -> None:
    """Have another controller of the cell lead; this one stands by from then on."""
    with MeshClient(address) as client:
        client.step_down()
    output.message(f"{address} has stepped down")
