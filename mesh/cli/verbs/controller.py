"""`mesh controller`: one controller in the foreground, as `python -m mesh.controller` runs it."""

from pathlib import Path

import click

from mesh.cli.options import (
    DEFAULT_ADDRESS,
    home_option,
    http_cors_option,
    http_hosts_option,
    http_option,
    join_option,
    no_page_option,
    policy_option,
    sources_option,
)
from mesh.controller.main import main as run_controller
from mesh.wire.credentials import TLS_VARIABLE


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_ADDRESS,
    show_default=True,
    help="Where clients and nodes reach it.",
)
@http_option
@http_hosts_option
@http_cors_option
@no_page_option
@policy_option
@click.option(
    "--turn",
    metavar="SECONDS",
    type=click.FloatRange(min=0, max=1),
    help="Decodes of an instance that take no longer together are one turn; default: each is one.",
)
@join_option
@sources_option
@click.option("--tls", metavar="DIR", envvar=TLS_VARIABLE, help="As of `mesh tls init DIR`.")
@click.option("--keys", is_flag=True, help="Each call needs a key, on the loopback, too.")
@click.option("--open", "open_", is_flag=True, help="None does, off the loopback either.")
@click.option("--journal", metavar="FILE", help="Write every decision of the cell there.")
@home_option
@click.pass_context
def controller(
    ctx: click.Context,
    listen: str,
    http: str,
    http_hosts: tuple[str, ...],
    http_origins: tuple[str, ...],
    no_page: bool,
    policy: str | None,
    turn: float | None,
    join_ms: float,
    sources: tuple[str, ...],
    tls: str | None,
    keys: bool,
    open_: bool,
    journal: str | None,
    home: Path,
) -> None:
    """Run a cell's controller in the foreground: gateway, admission, placement."""
    arguments = ["--listen", listen, "--http", http, "--home", str(home)]
    for host in http_hosts:
        arguments += ["--http-host-allowed", host]
    for origin in http_origins:
        arguments += ["--http-cors", origin]
    for rules in sources:
        arguments += ["--sources", rules]
    optional = (
        *(("--policy", policy), ("--turn", turn)),
        *(("--join-ms", join_ms), ("--journal", journal), ("--tls", tls)),
    )
    for option, value in optional:
        if value is not None:
            arguments += [option, str(value)]
    flags = (("--no-page", no_page), ("--keys", keys), ("--open", open_))
    arguments += [option for option, given in flags if given]
    ctx.exit(run_controller(arguments))
