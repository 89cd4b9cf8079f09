"""`mesh bench`: measurements that a clone repeats; each is a command of this group.

A measurement is imported when it is run: the group must list them without their libraries. What
needs a machine of its own, such as `make bench-engine`, lives in the folder bench/ instead.
"""

import importlib

import click

BENCHES = {
    "paper": "The evaluation of the LLM-Mesh paper, on virtual nodes.",
    "fidelity": "A live cell of this machine beside a simulation of it.",
}
"""The module of a measurement is `mesh.cli.bench_NAME`, and its command has its name."""


class Benches(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHES:
            return None
        command = getattr(importlib.import_module(f"mesh.cli.bench_{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(BENCHES.items()))


@click.group(cls=Benches, invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Repeat a measurement."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
