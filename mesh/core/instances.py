"""The life of instances as the controller decides it: start, ready, idle, unload, gone."""

from mesh.core.cell import DeploymentEntry, InstanceEntry, NodeEntry
from mesh.core.turn import Turn
from mesh.domain.actions import SendCommand, SetTimer
from mesh.domain.deployment import Deployment
from mesh.domain.events import KeepAliveExpired, LoadExpired, RetryLoadDue
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import INSTANCE, InstanceState, NodeState, advance
from mesh.domain.messages import InstanceReport, LoadInstance, UnloadInstance
from mesh.request.placement import NoRoom, Reclaim, Start, Wait, place_instance


def start_instance(turn: Turn, entry: DeploymentEntry) -> NoRoom | None:
    """Start loading an instance, or make room for one by unloading idle ones.

    Returns None when either is under way, else what was missing. A node holds at most one instance
    of a deployment: a second would compute on the same device and only take memory.
    """
    deployment = entry.deployment
    assert deployment is not None
    placed = _find_room(turn, entry, deployment)
    match placed:
        case Wait():
            return None
        case Start():
            _load(turn, entry, deployment, turn.cell.nodes[placed.node.node_id], placed)
            return None
        case Reclaim():
            for instance_id in placed.instance_ids:
                unload(turn, turn.cell.instances[instance_id])
            return None
        case NoRoom():
            return placed


def _find_room(
    turn: Turn, entry: DeploymentEntry, deployment: Deployment
) -> Start | Wait | Reclaim | NoRoom:
    """Nodes where its last load failed come into question only when no other has room."""
    taken = [i.node for i in entry.instances.values()]
    nodes = [n for n in turn.cell.nodes.values() if _may_take(n, deployment) and n not in taken]
    fresh = [n for n in nodes if n.node_id not in entry.avoided]
    wanted = turn.limits.kv_tokens_wanted
    placed = place_instance(deployment, fresh, kv_tokens_wanted=wanted, policy=turn.policy)
    if isinstance(placed, NoRoom) and len(fresh) < len(nodes):
        return place_instance(deployment, nodes, kv_tokens_wanted=wanted, policy=turn.policy)
    return placed


def _may_take(node: NodeEntry, deployment: Deployment) -> bool:
    return node.state is NodeState.READY and node.device in deployment.spec.devices


def _load(
    turn: Turn, entry: DeploymentEntry, deployment: Deployment, node: NodeEntry, start: Start
) -> None:
    turn.cell.instances_started += 1
    instance = InstanceEntry(
        instance_id=InstanceId(f"{entry.spec.name}-{turn.epoch}-{turn.cell.instances_started}"),
        deployment=entry.spec.name,
        model_id=deployment.model.model_id,
        node=node,
        state=InstanceState.LOADING,
        footprint=start.footprint,
        kv_blocks=start.kv_blocks,
        context_tokens_max=deployment.context_tokens_max,
        batch_max=turn.limits.batch_max,
        load_started_s=turn.now_s,
        phase="load",
    )
    fits = node.book.reserve(instance.instance_id, start.footprint.instance_bytes(start.kv_blocks))
    assert fits, f"placement chose {node.node_id} for {instance.instance_id} without room"
    _enter(turn, instance)
    turn.act(
        SendCommand(
            link_id=node.link_id,
            command=LoadInstance(
                instance_id=instance.instance_id,
                deployment=entry.spec.name,
                model=deployment.model,
                kv_blocks=start.kv_blocks,
                context_tokens_max=deployment.context_tokens_max,
                batch_max=turn.limits.batch_max,
            ),
        )
    )
    turn.act(
        SetTimer(
            at_s=turn.now_s + turn.limits.load_s_max,
            timer=LoadExpired(instance_id=instance.instance_id),
        )
    )


def _enter(turn: Turn, instance: InstanceEntry) -> None:
    turn.cell.instances[instance.instance_id] = instance
    instance.node.instances[instance.instance_id] = instance
    owner = turn.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.instances[instance.instance_id] = instance


def adopt(turn: Turn, node: NodeEntry, report: InstanceReport) -> None:
    """Take an instance that a node reports into the books; unload it if nothing wants it."""
    owner = turn.cell.deployments.get(report.deployment)
    wanted = (
        owner is not None
        and owner.deployment is not None
        and owner.deployment.model.model_id == report.model_id
        and owner.deployment.context_tokens_max == report.context_tokens_max
        and report.instance_id not in turn.cell.instances
        and all(i.node is not node for i in owner.instances.values())
    )
    if not wanted:
        turn.act(
            SendCommand(
                link_id=node.link_id, command=UnloadInstance(instance_id=report.instance_id)
            )
        )
    if report.instance_id in turn.cell.instances:
        return
    instance = InstanceEntry(
        instance_id=report.instance_id,
        deployment=report.deployment,
        model_id=report.model_id,
        node=node,
        state=InstanceState.READY if wanted else InstanceState.UNLOADING,
        footprint=report.footprint,
        kv_blocks=report.kv_blocks,
        context_tokens_max=report.context_tokens_max,
        batch_max=report.batch_max,
        was_loaded=True,
        load_started_s=turn.now_s,
        loaded_at_s=turn.now_s,
    )
    node.book.record(instance.instance_id, report.footprint.instance_bytes(report.kv_blocks))
    _enter(turn, instance)
    if wanted:
        note_idle(turn, instance)


def note_idle(turn: Turn, instance: InstanceEntry) -> None:
    """An instance has no request: unload it now if it is draining, else after its keep-alive."""
    instance.idle_since_s = turn.now_s
    if instance.state is InstanceState.DRAINING or instance.node.state is NodeState.DRAINING:
        unload(turn, instance)
        return
    owner = turn.cell.deployments.get(instance.deployment)
    keep_alive_s = owner.spec.scaling.keep_alive_s if owner else 0.0
    turn.act(
        SetTimer(
            at_s=turn.now_s + keep_alive_s,
            timer=KeepAliveExpired(instance_id=instance.instance_id, idle_since_s=turn.now_s),
        )
    )


def unload(turn: Turn, instance: InstanceEntry) -> None:
    """Tell the node to drop it; its memory stays booked until the node says that it is gone."""
    if instance.state is InstanceState.UNLOADING:
        return
    instance.state = advance(INSTANCE, instance.state, InstanceState.UNLOADING)
    turn.act(
        SendCommand(
            link_id=instance.node.link_id, command=UnloadInstance(instance_id=instance.instance_id)
        )
    )


def drain(turn: Turn, instance: InstanceEntry) -> None:
    """No new requests; it goes when its last one ends."""
    if instance.state is InstanceState.LOADING:
        unload(turn, instance)
    elif instance.state is InstanceState.READY:
        instance.state = advance(INSTANCE, instance.state, InstanceState.DRAINING)
        if not instance.requests:
            unload(turn, instance)


def forget(turn: Turn, instance: InstanceEntry) -> None:
    """The instance is gone: give its memory back and take it out of every book."""
    instance.state = advance(INSTANCE, instance.state, InstanceState.GONE)
    instance.node.book.release(instance.instance_id)
    instance.node.instances.pop(instance.instance_id, None)
    turn.cell.instances.pop(instance.instance_id, None)
    owner = turn.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.instances.pop(instance.instance_id, None)


def note_load_failure(turn: Turn, entry: DeploymentEntry, node: NodeEntry, message: str) -> None:
    """Remember a failed load, and pause before the next: longer after each, up to a bound."""
    entry.load_failures += 1
    entry.load_error = message
    entry.avoided[node.node_id] = message
    doublings = min(entry.load_failures - 1, turn.limits.load_retry_doublings_max)
    entry.paused_until_s = turn.now_s + turn.limits.load_retry_s * 2**doublings
    turn.act(SetTimer(at_s=entry.paused_until_s, timer=RetryLoadDue(name=entry.spec.name)))


def keep_minimum(turn: Turn, entry: DeploymentEntry) -> None:
    """Load instances until `replicas_min` serve or will, as far as there is room."""
    turn.cell.below_minimum.pop(entry.spec.name, None)
    if entry.deployment is None or turn.now_s < entry.paused_until_s:
        return
    while (before := entry.replicas()) < entry.spec.scaling.replicas_min:
        start_instance(turn, entry)
        if entry.replicas() == before:
            turn.cell.below_minimum[entry.spec.name] = None
            return


def keep_minima(turn: Turn) -> None:
    """An instance became idle: its memory may be what a deployment below its minimum lacks."""
    for name in list(turn.cell.below_minimum):
        entry = turn.cell.deployments.get(name)
        if entry is None:
            del turn.cell.below_minimum[name]
        else:
            keep_minimum(turn, entry)


def trim_to_maximum(turn: Turn, entry: DeploymentEntry) -> None:
    """Drain instances above `replicas_max`: those that still load, then the smallest batch."""
    serving = [i for i in entry.instances.values() if i.takes_requests]
    serving.sort(key=lambda i: (i.state is InstanceState.READY, i.batch, i.instance_id))
    for instance in serving[: max(0, len(serving) - entry.spec.scaling.replicas_max)]:
        drain(turn, instance)
