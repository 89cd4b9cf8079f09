"""Writes docs/cli-reference.md from the commands themselves (`python scripts/gen_cli.py`)."""

import re
from collections.abc import Iterator
from pathlib import Path

import click

from mesh.cli.main import mesh

TARGET = Path(__file__).resolve().parent.parent / "docs" / "cli-reference.md"
HEAD = """# Every verb and option

Generated from the commands by `python scripts/gen_cli.py`; a test fails when this page is not
current. `mesh VERB --help` says the same. What verbs are for, what they print and how they end:
[cli.md](cli.md).
"""


def page() -> str:
    root = click.Context(mesh, info_name="mesh")
    return HEAD + "".join(_sections(mesh, root))


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    yield _section(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None, name
            inner = click.Context(below, info_name=name, parent=context)
            yield from _sections(below, inner)


def _section(command: click.Command, context: click.Context) -> str:
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    text = " ".join((command.help or "").split())
    rows = [_row(param, context) for param in command.get_params(context) if _told(param)]
    table = "| option | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return f"\n## `{path}`\n\n{text}\n\n```\n{usage}\n```\n" + (f"\n{table}" if table else "")


def _told(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and not param.hidden and "--help" not in param.opts


def _row(param: click.Parameter, context: click.Context) -> str:
    record = param.get_help_record(context)
    assert record is not None, param
    names, text = record
    return f"| `{_cell(names)}` | {_cell(text)} |"


def _cell(text: str) -> str:
    """On a line, with nothing that ends a cell."""
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
