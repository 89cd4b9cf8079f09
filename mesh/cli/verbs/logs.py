"""`mesh logs`: what happened in the cell, in words."""

import time
from collections import deque
from collections.abc import Iterable, Iterator

import click

from mesh.cli import output
from mesh.cli.options import controller_option, output_option
from mesh.cli.output import Format
from mesh.domain.views import CellEvent
from mesh.report.plain import plain_fields
from mesh.wire.client import MeshClient

LINES_MAX = 10_000
KIND_WIDTH = len("deployment")


@click.command()
@click.argument("name", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0, max=LINES_MAX),
    default=50,
    show_default=True,
    help="Lines of what has happened so far.",
)
@output_option((Format.TABLE, Format.JSON), "json: one object a line.")
@controller_option
def logs(name: str | None, follow: bool, lines: int, form: Format, address: str) -> None:
    """Show the cell's events, or those about NAME: a deployment, instance, request or node."""
    # A filter needs more of the backlog than it lets through.
    backlog = lines if name is None else LINES_MAX
    with MeshClient(address) as client:
        events: Iterator[CellEvent] = client.watch(backlog=backlog, follow=follow)
        if name is not None:
            events = (event for event in events if _about(event, name))
        if not follow:
            events = iter(deque(events, maxlen=lines))
        _print(events, form)


def _about(event: CellEvent, name: str) -> bool:
    line = event.line
    return name in (line.subject, line.deployment, *line.text.replace(",", " ").split())


def _print(events: Iterable[CellEvent] | Iterator[CellEvent], form: Format) -> None:
    for event in events:
        at_s = time.time() - event.age_s
        line = event.line
        if form is Format.JSON:
            told = {"number": event.number, "time_unix_s": round(at_s, 3)}
            output.json_line({**told, **plain_fields(line)})
        else:
            clock = time.strftime("%H:%M:%S", time.localtime(at_s))
            output.text(f"{clock}  {line.kind:<{KIND_WIDTH}}  {line.subject}  {line.text}")
