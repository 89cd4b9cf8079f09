"""`mesh page`: the page over the journal of a controller, as it was at each of its decisions."""

import asyncio
import secrets
import signal
from pathlib import Path

import click

from mesh.cli import output
from mesh.cli.options import file_option
from mesh.domain.errors import InvalidInput
from mesh.wire.channel import is_loopback, parse_address

DRAIN_S_MAX = 1.0
DEFAULT_LISTEN = "127.0.0.1:8071"


@click.command()
@file_option("--journal", "The journal of a controller.", required=True)
@click.option(
    "--http",
    "listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where browsers find it; port 0 takes a free one.",
)
@click.option(
    "--open", "is_open", is_flag=True, help="All may see it, off this machine's loopback, too."
)
def page(journal: Path, listen: str, is_open: bool) -> None:
    """Show a controller's journal in the browser: what the cell knew and decided, step by step."""
    if not is_open and not is_loopback(parse_address(listen)[0]):
        raise InvalidInput(
            f"whoever reaches {listen} would see the journal and move in it without a key",
            hint="give --http 127.0.0.1:PORT, or --open lets everybody do that",
        )
    asyncio.run(_serve(journal, listen))


async def _serve(path: Path, listen: str) -> None:
    """Until Ctrl-C. Its libraries are imported here: they take longer than other verbs do."""
    from mesh.controller.journal_view import JournalView
    from mesh.http.feed import Feed
    from mesh.http.journal import journal_application
    from mesh.http.server import HttpServer

    view = JournalView(path)
    server = HttpServer(listen)
    feed = Feed(view, run=f"j{secrets.randbits(48)}", unix_s=view.unix_s)
    server.start(journal_application(view, feed, lambda: view.viewed))
    output.text(f"http://{server.address}/")
    output.message(f"{path.name} is shown there; Ctrl-C ends it")
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    await ending.wait()
    feed.close()
    await server.stop(DRAIN_S_MAX)
    view.close()
