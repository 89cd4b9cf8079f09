"""`mesh bench`: measurements that a clone repeats; each is a command of this group.

A measurement is imported when it is run: the group must list them without their libraries. What
needs a machine of its own, such as `make bench-engine`, lives in the folder bench/ instead.
"""

from typing import ClassVar

import click

from mesh.cli.main import Verbs


class Benches(Verbs):
    """The module of a measurement is `mesh.cli.bench_NAME`, and its command has its name."""

    verbs: ClassVar = {
        "paper": "The evaluation of the LLM-Mesh paper, on virtual nodes.",
        "polyserve": "The goodput of PolyServe and its baselines, on virtual H200.",
        "operators": "Operator-level autoscaling, by the paper's formulas and executed.",
        "fidelity": "A live cell of this machine beside a simulation of it.",
    }
    module = "mesh.cli.bench_{}"


@click.group(cls=Benches, invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Repeat a measurement."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
