"""One picture of `mesh top`: the cell in a line, then each node with its book of memory, its
instances, and the memory operations of its reservation station.

Pure: views in, lines out. `top` fetches the views and shows the lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from mesh.cli.memory_tables import OPERATIONS
from mesh.cli.output import Column, harmless, number, table_lines, word
from mesh.cli.tables import hundredths, mebibytes, milliseconds
from mesh.domain.ids import DeploymentName
from mesh.domain.views import CellStatus, DeploymentSnapshot, InstanceSnapshot, NodeSnapshot
from mesh.report.memory_parts import Part, free_bytes, parts

BAR_CELLS = 72
INDENT = "  "


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
    queued = {found.spec.name: found.queued for found in picture.deployments}
    for node in picture.nodes:
        lines += [_text(""), *_node(node, queued)]
    lines += _without_instance(picture.deployments)
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


def _node(node: NodeSnapshot, queued: dict[DeploymentName, int]) -> list[Text]:
    found = parts(node)
    title = (
        f"{node.node_id}  {node.state}  {node.device}, {node.cores} cores, {node.engine}, "
        f"silent {node.silent_s:.1f} s"
    )
    legend = "  ".join(f"{p.letter} {p.name} {_mib(p.size_bytes)}" for p in found)
    lines = [_text(title, "bold"), _indented(bar(found)), _indented(_text(f"{legend} MiB"))]
    lines.append(_indented(_text(_account(node))))
    if node.instances:
        lines += map(_indented, table_lines(_instances(queued), node.instances))
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


def _instances(queued: dict[DeploymentName, int]) -> tuple[Column[InstanceSnapshot], ...]:
    """`queued`: requests, by deployment."""
    return (
        word("INSTANCE", lambda i: i.instance_id),
        word("STATE", lambda i: i.state),
        number("BATCH", lambda i: i.batch),
        number("QUEUED", lambda i: queued.get(i.deployment, 0)),
        number("HEADROOM_S", lambda i: hundredths(i.headroom_least_s)),
        number("ITER_MS", lambda i: milliseconds(i.iteration_s) if i.iteration_s else None),
        number("CORRECTION", lambda i: f"{i.correction:.2f}"),
        number("KV_USED_MIB", lambda i: mebibytes(i.kv_used_bytes)),
        number("KV_HELD_MIB", lambda i: mebibytes(i.kv_bytes)),
    )


def _without_instance(deployments: Sequence[DeploymentSnapshot]) -> list[Text]:
    """Queues that no instance shows."""
    waiting = [d for d in deployments if d.queued and not d.instances]
    if not waiting:
        return []
    names = ", ".join(f"{d.spec.name} {d.queued}" for d in waiting)
    return [_text(""), _text(f"queued without an instance: {names}", "yellow")]


def _text(words: str, style: str = "") -> Text:
    return Text(harmless(words), style=style, end="")


def _indented(line: Text) -> Text:
    return Text(INDENT, end="").append_text(line)
