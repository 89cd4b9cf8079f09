"""`mesh top`: where the cell's memory is and how its instances keep up, live.

It asks the controller again and again, and draws on a screen of its own until Ctrl-C. A controller
that goes away while it is watched may come back within RECONNECT_S_MAX.
"""

import sys
import time

import click
from rich.live import Live
from rich.text import Text

from mesh.cli import output
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Format
from mesh.cli.top_frame import Picture, fitting, frame
from mesh.domain.errors import Unavailable
from mesh.domain.lifecycle import NodeState
from mesh.wire.client import MeshClient

INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0
RECONNECT_S_MAX = 30.0
"""After that a controller that does not answer is given up."""


@click.command()
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(min=INTERVAL_S_MIN, max=INTERVAL_S_MAX),
    default=1.0,
    show_default=True,
    help="Between two pictures.",
)
@click.option("--once", is_flag=True, help="One picture, as it is where stdout is no terminal.")
@format_option
@controller_option
def top(interval_s: float, once: bool, form: Format, address: str) -> None:
    """Watch each node's memory, its instances and memory operations, until Ctrl-C."""
    with MeshClient(address) as client:
        if form is not Format.TABLE:
            output.structured(client.nodes(), form)
        elif once or not _can_draw():
            output.lines(frame(_picture(client), address))
        else:
            try:
                _watch(client, address, interval_s)
            except KeyboardInterrupt:
                return


def _can_draw() -> bool:
    return sys.stdout.isatty() and not output.console(sys.stdout).is_dumb_terminal


def _picture(client: MeshClient) -> Picture:
    joined = tuple(n for n in client.nodes() if n.state is not NodeState.STARTING)
    return Picture(status=client.status(), nodes=joined, deployments=client.list())


def _watch(client: MeshClient, address: str, interval_s: float) -> None:
    """Raises Unavailable when there is no controller, or none any more for RECONNECT_S_MAX."""
    picture = _picture(client)
    seen_s = time.monotonic()
    trouble = ""
    with Live(console=output.console(sys.stdout), screen=True, auto_refresh=False) as live:
        while True:
            shown = fitting(frame(picture, address, trouble), live.console.height)
            live.update(_drawn(shown), refresh=True)
            time.sleep(interval_s)
            try:
                picture = _picture(client)
            except Unavailable as error:
                trouble = _lost(address, time.monotonic() - seen_s, error)
            else:
                seen_s, trouble = time.monotonic(), ""


def _lost(address: str, for_s: float, error: Unavailable) -> str:
    """Say so on top of the last picture; raises Unavailable when it has been too long."""
    if for_s > RECONNECT_S_MAX:
        raise Unavailable(
            f"the controller at {address} has not answered for {for_s:.0f} s: {error.message}",
            hint="start it again, or see its log",
        ) from error
    return f"reconnecting: no answer for {for_s:.0f} s (given up after {RECONNECT_S_MAX:.0f} s)"


def _drawn(lines: list[Text]) -> Text:
    """One line of the screen each: what is wider is cut there, and marked."""
    drawn = Text("\n", end="").join(lines)
    drawn.no_wrap, drawn.overflow = True, "ellipsis"
    return drawn
