"""`mesh report`: what the cell did within the last hour, as tables, JSON or a page to keep."""

import json
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.options import controller_option, file_option, format_option, span_s
from mesh.cli.output import Format
from mesh.cli.report_file import read_report, report_of, show_report, write_report
from mesh.domain.errors import InvalidInput
from mesh.wire.client import MeshClient


@click.command()
@click.option(
    "--since",
    metavar="SPAN",
    default="1h",
    show_default=True,
    help="How far back, such as 90s, 15m, 1h or 1d, as long as the controller runs.",
)
@file_option("--html", "Write it as one page that needs nothing else.", written=True)
@file_option("--beside", "Show another run beside it: a report as JSON.")
@format_option
@controller_option
def report(since: str, html: Path | None, beside: Path | None, form: Format, address: str) -> None:
    """Report what was served, how SLOs were kept, what was refused and loaded, and what failed."""
    since_s, other = span_s(since, "smhd"), read_report(beside)
    if since_s is None:
        raise InvalidInput(f"--since {since!r} is no span", hint="write 90s, 15m, 1h or 1d")
    with MeshClient(address) as client:
        made = report_of(json.loads(client.report(since_s)), f"the answer of {address}")
    if html is not None:
        write_report(html, made, other)
    if form is not Format.TABLE:
        output.structured(made, form)
    elif html is None:
        show_report(made, other)
