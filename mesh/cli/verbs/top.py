"""`mesh top`: where the cell's memory is and how its instances keep up, live.

It asks the controller again and again, and draws on a screen of its own until Ctrl-C. A controller
that goes away while it is watched may come back within RECONNECT_S_MAX.
"""

import sys
import time
from collections.abc import Sequence

import click
from rich.live import Live
from rich.text import Text

from mesh.cli import output
from mesh.cli.options import controller_option, format_option
from mesh.cli.output import Column, Format, harmless, number, table_lines, word
from mesh.cli.tables import (
    OPERATIONS,
    hundredths,
    mebibytes,
    milliseconds,
    on_device,
    wanted_words,
)
from mesh.domain.errors import Unavailable
from mesh.domain.lifecycle import NodeState
from mesh.domain.values import dataclass
from mesh.domain.views import CellStatus, DeploymentSnapshot, InstanceSnapshot, NodeSnapshot
from mesh.report.memory_parts import Part, free_bytes, parts
from mesh.wire.client import MeshClient

BAR_CELLS = 72
QUEUES_MAX = 6
"""The longest queues are shown, and how many more there are."""
INDENT = "  "
INSTANCES: tuple[Column[InstanceSnapshot], ...] = (
    word("INSTANCE", lambda i: i.instance_id),
    word("STATE", lambda i: i.state),
    number("BATCH", lambda i: i.batch),
    number("HEADROOM_S", lambda i: hundredths(i.headroom_least_s)),
    number("ITER_MS", lambda i: milliseconds(i.iteration_s) if i.iteration_s else None),
    number("CORRECTION", lambda i: f"{i.correction:.2f}"),
    number("KV_USED_MIB", lambda i: mebibytes(i.kv_used_bytes)),
    number("KV_HELD_MIB", lambda i: mebibytes(i.kv_bytes)),
    word("ON_DEVICE", lambda i: on_device(i)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What the controller said at one time."""

    status: CellStatus
    nodes: Sequence[NodeSnapshot]
    deployments: Sequence[DeploymentSnapshot]


def bar(found: Sequence[Part], cells: int = BAR_CELLS) -> Text:
    """A bar of letters in proportion to the parts, with at least one letter for a part that is not
    empty.
    """
    total_bytes = sum(part.size_bytes for part in found)
    widths = [
        max(cells * part.size_bytes // total_bytes, 1) if part.size_bytes else 0 for part in found
    ]
    if any(widths):
        widths[widths.index(max(widths))] += cells - sum(widths)
    line = Text(end="")
    for part, width in zip(found, widths, strict=True):
        line.append(part.letter * width, style=part.style)
    return line


def frame(picture: Picture, address: str, trouble: str = "") -> list[Text]:
    """The lines, none of them cut. `trouble` stands on top, where there is any."""
    lines = [_text(trouble, "bold red")] if trouble else []
    lines.append(_text(_headline(picture.status, address), "bold"))
    if picture.status.wanted:
        lines.append(_text(f"nodes wanted: {wanted_words(picture.status.wanted)}"))
    queues = sorted((d for d in picture.deployments if d.queued), key=lambda d: -d.queued)
    if queues:
        shown = [f"{d.spec.name} {d.queued}" for d in queues[:QUEUES_MAX]]
        more = [f"{len(queues) - QUEUES_MAX} more"] if len(queues) > QUEUES_MAX else []
        lines.append(_text(f"queued by deployment: {', '.join(shown + more)}", "yellow"))
    for node in picture.nodes:
        lines += [_text(""), *_node(node)]
    return lines


def fitting(lines: Sequence[Text], height: int) -> list[Text]:
    """As many lines as there is room for; the last one says how many are missing."""
    if len(lines) <= height:
        return list(lines)
    kept = max(height - 1, 0)
    missing = f"… {len(lines) - kept} more lines; `mesh top --once` shows all"
    return [*lines[:kept], _text(missing, "yellow")]


def _headline(status: CellStatus, address: str) -> str:
    refused = sum(count for _, count in status.refused)
    return (
        f"mesh {status.version} at {address}: "
        f"{status.nodes_ready} of {status.nodes} nodes ready, {status.running} running, "
        f"{status.queued} queued, {status.served} served, {refused} refused"
    )


def _node(node: NodeSnapshot) -> list[Text]:
    found = parts(node)
    title = (
        f"{node.node_id}  {node.state}  {node.device}, {node.cores} cores, {node.engine}, "
        f"silent {node.silent_s:.1f} s"
    )
    legend = "  ".join(f"{p.letter} {p.name} {_mib(p.size_bytes)}" for p in found)
    lines = [_text(title, "bold"), _indented(bar(found)), _indented(_text(f"{legend} MiB"))]
    lines.append(_indented(_text(_account(node))))
    if node.instances:
        lines += map(_indented, table_lines(INSTANCES, node.instances))
    if node.operations:
        lines += map(_indented, table_lines(OPERATIONS, node.operations))
    return lines


def _account(node: NodeSnapshot) -> str:
    """What the books say against what the system says."""
    books = (
        f"limit {_mib(node.memory_bytes)}, promised {_mib(node.promised_bytes)}, "
        f"tracked {_mib(node.tracked_bytes)}, to promise {_mib(free_bytes(node))} MiB"
    )
    if not node.rss_bytes:
        return f"{books}; RSS not told yet"
    return (
        f"{books}; RSS {_mib(node.rss_bytes)} MiB, unaccounted {_mib(node.unaccounted_bytes)} MiB"
    )


def _mib(size_bytes: int) -> str:
    """A tenth of a MiB says nothing beside a hundred."""
    size_mib = size_bytes / 2**20
    return f"{size_mib:.1f}" if abs(size_mib) < 100 else f"{size_mib:.0f}"


def _text(words: str, style: str = "") -> Text:
    return Text(harmless(words), style=style, end="")


def _indented(line: Text) -> Text:
    return Text(INDENT, end="").append_text(line)


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
