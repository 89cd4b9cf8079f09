"""How many nodes of each kind the cell wants, for whoever starts and stops them.

More once calls are refused or wait for room or time that one node more would have; fewer once
nothing has lacked a node for a while and fewer have had work. Once a second it is looked at, and
the number of a kind changes no more often than every `node_pause_s`. Before: `requests`, which says
what lacked a node. After: the cell's snapshot, by which it is published.
"""

from math import ceil

from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.wanted import LACKS_LEAST, LOOK_S, WantedEntry
from mesh.domain.actions import ReportMissingNodes, WantNodes
from mesh.domain.lifecycle import NodeState

FULL_SHARE = 0.7
"""Fewer nodes would do if they had work for less than this share of the time."""


def look(ctx: EventContext) -> None:
    for entry in ctx.cell.wanted.values():
        if ctx.now_s - entry.looked_s >= LOOK_S:
            nodes = [node for node in ctx.cell.nodes.values() if node.device is entry.range.device]
            _look(ctx, entry, [node for node in nodes if node.state is NodeState.READY])


def _look(ctx: EventContext, entry: WantedEntry, nodes: list[NodeEntry]) -> None:
    """`nodes` are those of its kind that take new work."""
    ready, limits = len(nodes), ctx.limits
    working = sum(not ctx.rests(node) for node in nodes)
    waiting = _waiting(ctx, entry)
    entry.note_look(ctx.now_s, working=working, waiting=waiting, mean_s=limits.node_idle_s)
    entry.note_ready(nodes, ctx.now_s)
    if ctx.now_s < entry.began_s + limits.node_settle_s:
        return
    if entry.wanted is None:
        _want(ctx, entry, ready, f"{ready} have joined")
    elif ctx.now_s - entry.changed_s >= limits.node_pause_s:
        _change(ctx, entry, nodes)
    _report_missing(ctx, entry, ready)


def _change(ctx: EventContext, entry: WantedEntry, nodes: list[NodeEntry]) -> None:
    """Want more nodes, or fewer, if need be."""
    assert entry.wanted is not None
    ready = len(nodes)
    placed = sum(placed for placed, _, _ in entry.looks)
    lacked = sum(refused for _, refused, _ in entry.looks) + entry.waiting
    looks = sum(lacks for _, _, lacks in entry.looks)
    if lacked and looks >= LACKS_LEAST:
        # As many as would have placed all, if each placed as many as these did.
        more = ceil(ready * (placed + lacked) / max(placed, 1))
        more = min(max(more, ready + 1), 2 * ready + 1)
        if more > entry.wanted:
            _want(ctx, entry, more, f"{lacked} of {placed + lacked} calls lacked a node")
    elif ctx.now_s - max(entry.lacked_s, entry.began_s) >= ctx.limits.node_idle_s:
        fewer = max(ceil(entry.working / FULL_SHARE), _least_by_minimum(nodes))
        if fewer < entry.wanted:
            _want(ctx, entry, fewer, f"{entry.working:.1f} of {ready} had work, in the mean")


def _want(ctx: EventContext, entry: WantedEntry, count: int, why: str) -> None:
    """As many, within what the kind may have."""
    count = min(max(count, entry.range.least), entry.range.most)
    if count != entry.wanted:
        entry.want(count, why, ctx.now_s)
        ctx.act(WantNodes(device=entry.range.device, wanted=count, why=why))


def _waiting(ctx: EventContext, entry: WantedEntry) -> int:
    """What waits for a node more: requests that have waited since the last look and have no
    promise, best effort apart, and deployments that lack room for their minimum.
    """
    waiting = 0
    for deployment in ctx.cell.with_queues():
        if ctx.wanted_for(deployment) is entry:
            came_s = ctx.now_s - LOOK_S
            waiting += sum(
                request.has_no_place and not request.slo.best_effort and request.arrival_s < came_s
                for request in deployment.queue
            )
    # Where there is no node, nobody has tried yet.
    deployments = ctx.cell.deployments
    for name in ctx.cell.below_minimum if ctx.cell.nodes else deployments:
        below = deployments[name]
        lacks = below.replicas() < below.spec.scaling.replicas_min
        waiting += lacks and ctx.wanted_for(below, for_minimum=True) is entry
    return waiting


def _least_by_minimum(nodes: list[NodeEntry]) -> int:
    """How many nodes hold what is to stay loaded by deployments' minimum."""
    return sum(
        any(
            (owner := node.deployments.get(instance.deployment)) is not None
            and owner.replicas() <= owner.spec.scaling.replicas_min
            for instance in node.instances.values()
        )
        for node in nodes
    )


def _report_missing(ctx: EventContext, entry: WantedEntry, ready: int) -> None:
    """Say once that nodes which are wanted have not joined."""
    since_s = entry.lacking_since_s
    if since_s is None or entry.reported or entry.wanted is None:
        return
    for_s = ctx.now_s - since_s
    if for_s >= ctx.limits.node_late_s:
        entry.note_reported()
        told = ReportMissingNodes(
            device=entry.range.device, wanted=entry.wanted, ready=ready, for_s=for_s
        )
        ctx.act(told)
