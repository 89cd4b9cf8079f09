"""`mesh wait`: for scripts, which go on when deployments are ready, loaded or gone."""

import time

import click

from mesh.cli import output
from mesh.cli.options import controller_option, timeout_option
from mesh.cli.waiting import Goal, wait_for
from mesh.domain.ids import DeploymentName
from mesh.wire.client import MeshClient


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--for",
    "goal",
    type=click.Choice([goal.value for goal in Goal]),
    default=Goal.READY.value,
    show_default=True,
    callback=lambda _, __, value: Goal(value),
    help="ready: replicas_min instances serve; loaded: at least one does; gone: it is deleted.",
)
@timeout_option(600.0, "How long it waits, for all of them.")
@controller_option
def wait(names: tuple[str, ...], goal: Goal, timeout_s: float, address: str) -> None:
    """Wait until deployments are ready, loaded or gone."""
    until_s = time.monotonic() + timeout_s
    with MeshClient(address) as client:
        for name in names:
            wait_for(client, DeploymentName(name), goal, max(until_s - time.monotonic(), 0.0))
            output.message(f"{name}: {goal}")
