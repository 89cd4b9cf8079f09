"""Nodes as the controller sees them: joining, draining, lost.

A node is the truth of what is loaded on it; the controller takes that over when the node joins.
Everything that a lost node held is forgotten at once, and its requests go elsewhere with their
tokens so far. What a node says while it is linked is taken by `reports`.
"""

from mesh.core.controller.instances.lifecycle import adopt, forget, note_idle, unload
from mesh.core.controller.operations import fail_operation, reply_error
from mesh.core.controller.requests import resuming
from mesh.core.controller.requests.migration import move_soon
from mesh.core.controller.requests.replicas import room_changed
from mesh.core.controller.requests.serving import requeue
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import AcceptLink, CloseLink, ReplyDone
from mesh.domain.events import DrainRequested, NodeConnected
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.domain.values import replace
from mesh.memory.station import ReservationStation
from mesh.policy.rules.swapping import SwapRule, by_whole
from mesh.policy.rules.turns import name_of


def connect(ctx: EventContext, connected: NodeConnected) -> None:
    """A node dials in: take it and what it holds over, unless its name is taken."""
    hello, link_id = connected.hello, connected.link_id
    known = ctx.cell.nodes.get(hello.node_id)
    if known is not None and known.hello.run_id != hello.run_id:
        message = f"a node named {hello.node_id!r} is in this cell already"
        hint = "start this one with another --name"
        ctx.act(CloseLink(link_id=link_id, error="AlreadyExists", message=message, hint=hint))
        return
    wanted = ctx.policy.node_rule.turn
    if wanted.digest and hello.rule_digest != wanted.digest:
        has = f"the digest {hello.rule_digest}" if hello.rule_digest else "no policy file"
        message = (
            f"node {hello.node_id!r} has {has}; this cell computes by the turn rule "
            f"{wanted.name!r} of a policy file with the digest {wanted.digest}"
        )
        hint = "start the node with --policy and the same file"
        ctx.act(CloseLink(link_id=link_id, error="InvalidInput", message=message, hint=hint))
        return
    draining = known is not None and known.state is NodeState.DRAINING
    if known is not None:
        # Hellos of different links may overtake each other: should the node live on the old one,
        # it has to hear that this one took its place.
        reason = "the node opened a new link"
        ctx.act(CloseLink(link_id=known.link_id, error="Unavailable", message=reason))
        lose(ctx, known, reason)
    capacity_bytes = max(hello.memory_bytes - hello.base_bytes, 0)
    # On a CPU a swap takes as long as a load, and nobody has measured what comes of it.
    swaps = hello.swaps and hello.device is DeviceKind.GPU
    swaps = swaps and isinstance(ctx.policy.rule, SwapRule)
    turns = ctx.policy.rule if swaps and hello.swaps_parts else by_whole(ctx.policy.rule)
    swap_bytes = capacity_bytes if swaps else 0
    node = NodeEntry(
        hello=hello,
        link_id=link_id,
        rule=replace(ctx.policy.node_rule, turn=name_of(turns), swap_bytes=swap_bytes),
        turns=ctx.policy.guarded(turns),
        station=ReservationStation(capacity_bytes=capacity_bytes, pools=swaps),
        last_seen_s=ctx.now_s,
        state=NodeState.DRAINING if draining else NodeState.READY,
        deployments=ctx.cell.deployments,
    )
    ctx.cell.add_node(node)
    welcome = len(ctx.actions)
    busy = {held.instance_id for held in hello.requests}
    for report in hello.instances:
        adopt(ctx, node, report, busy=report.instance_id in busy)
    found = [resuming.adopt(ctx, node, held) for held in hello.requests]
    adopted = tuple([one for one in found if one is not None])
    for instance in list(node.instances.values()):
        if instance.instance_id in busy and instance.is_loaded and not instance.requests:
            note_idle(ctx, instance)
    # Before what the node is told of its instances.
    rule = replace(node.rule, adopted=adopted)
    ctx.act(AcceptLink(link_id=link_id, rule=rule), at=welcome)
    if hello.leaves:
        drain(ctx, node)
    room_changed(ctx)


def lose(ctx: EventContext, node: NodeEntry, reason: str) -> None:
    """The node is out of reach: forget what it held, move its requests, fail its imports."""
    ctx.cell.remove_node(node)
    ctx.cell.prefetches.note_wasted(node.prefetches.unused())
    for instance in list(node.instances.values()):
        requests = list(instance.requests.values())
        forget(ctx, instance)
        for request in requests:
            message = f"node {node.node_id!r} was lost ({reason})"
            requeue(ctx, request, RefusalReason.NODE_LOST, message)
    for operation in list(ctx.cell.operations.values()):
        if operation.node is node:
            message = f"node {node.node_id!r} was lost while it worked on that ({reason})"
            hint = "`mesh logs` shows why; `mesh nodes` shows whether it is back"
            fail_operation(ctx, operation, "Unavailable", message, hint)
    room_changed(ctx)


def check_leases(ctx: EventContext) -> None:
    """Drop nodes that have been silent too long."""
    for node in list(ctx.cell.nodes.values()):
        silent_s = ctx.now_s - node.last_seen_s
        if silent_s > ctx.limits.node_lease_s:
            reason = f"silent for {silent_s:.1f} s; the lease is {ctx.limits.node_lease_s:.1f} s"
            ctx.act(CloseLink(link_id=node.link_id, error="Unavailable", message=reason))
            lose(ctx, node, reason)


def drain_node(ctx: EventContext, asked: DrainRequested) -> None:
    """No new work for a node; its instances go as they become idle. `undo` takes that back."""
    node = ctx.cell.nodes.get(asked.node_id)
    if node is None:
        message = f"there is no node {asked.node_id!r}"
        hint = f"nodes: {', '.join(sorted(ctx.cell.nodes)) or 'none'}"
        reply_error(ctx, asked.operation_id, "NotFound", message, hint)
        return
    if asked.undo:
        ctx.cell.turn_node(node, NodeState.READY)
        room_changed(ctx)
    else:
        drain(ctx, node)
    ctx.act(ReplyDone(operation_id=asked.operation_id, message=node.state.value))


def drain(ctx: EventContext, node: NodeEntry) -> None:
    """No new work for it: what is idle goes now, and requests move to other nodes."""
    ctx.cell.turn_node(node, NodeState.DRAINING)
    for instance in list(node.instances.values()):
        if instance.state is InstanceState.UNLOADING:
            continue
        if instance.state is InstanceState.LOADING:
            unload(ctx, instance)
            continue
        instance.expect_nobody()
        if not instance.requests:
            note_idle(ctx, instance)
    move_soon(ctx)
    room_changed(ctx)
