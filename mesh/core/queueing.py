"""The queues: requests wait per deployment, first come first served, for a place or a load.

Whenever room appears, the turn ends by placing queue heads, the longest waiting first, and by
seeing to another instance for those that are left. Every wait ends by `queue_wait_s_max`.
"""

from bisect import insort

from mesh.core.cell import DeploymentEntry, InstanceEntry, RequestEntry
from mesh.core.ending import refuse, refuse_all_queued
from mesh.core.instances import keep_minima, note_idle, start_instance
from mesh.core.turn import Turn
from mesh.domain.actions import SendCommand, SetTimer, TellWaiting
from mesh.domain.events import QueueWaitExpired
from mesh.domain.lifecycle import REQUEST, InstanceState, NodeState, RequestState, advance
from mesh.domain.messages import SubmitRequest
from mesh.domain.reasons import RefusalReason
from mesh.domain.request import RequestOrder
from mesh.domain.units import format_bytes
from mesh.request.placement import first_with_room


def enqueue(turn: Turn, entry: DeploymentEntry, held: RequestEntry) -> None:
    """Queue a request by its arrival: one that has run before goes ahead of those that came later.

    The queue may grow beyond its bound by such requests, of which there are no more than places.
    """
    held.queued_at_s = turn.now_s
    insort(entry.queue, held, key=lambda waiting: waiting.arrival_s)
    timer = QueueWaitExpired(request_id=held.request.request_id, queued_at_s=turn.now_s)
    turn.act(SetTimer(at_s=turn.now_s + turn.limits.queue_wait_s_max, timer=timer))
    turn.to_fill[entry.spec.name] = None


def settle(turn: Turn) -> None:
    """The end of a turn: fill the room that appeared. What stays idle may be wanted by others."""
    while turn.room_appeared or turn.to_fill or turn.released:
        _fill(turn)
        _note_released(turn)


def _fill(turn: Turn) -> None:
    deployments = turn.cell.deployments
    names = list(deployments if turn.room_appeared else turn.to_fill)
    turn.room_appeared = False
    turn.to_fill.clear()
    waiting = [entry for name in names if (entry := deployments.get(name)) and entry.queue]
    waiting.sort(key=lambda d: (d.queue[0].arrival_s, d.spec.name))
    for entry in waiting:
        while entry.queue and _place(turn, entry, entry.queue[0]):
            entry.queue.popleft()
    # Only then: an instance that is idle, but that a queue was waiting for, is nobody else's room.
    for entry in waiting:
        if entry.queue:
            _scale_out(turn, entry)


def _note_released(turn: Turn) -> None:
    released, turn.released = turn.released, {}
    for instance in released.values():
        alive = instance.state in (InstanceState.READY, InstanceState.DRAINING)
        if alive and not instance.requests:
            note_idle(turn, instance)
            turn.room_appeared = True
    if turn.room_appeared:
        keep_minima(turn)


def _place(turn: Turn, entry: DeploymentEntry, held: RequestEntry) -> bool:
    ready = [i for i in entry.instances.values() if _takes(i)]
    instance = first_with_room(ready, held.request.tokens_max, turn.policy)
    if instance is not None:
        _submit(turn, entry, held, instance)
    return instance is not None


def _takes(instance: InstanceEntry) -> bool:
    return instance.state is InstanceState.READY and instance.node.state is NodeState.READY


def _submit(
    turn: Turn, entry: DeploymentEntry, held: RequestEntry, instance: InstanceEntry
) -> None:
    held.state = advance(REQUEST, held.state, RequestState.RUNNING)
    held.attempt += 1
    held.instance = instance
    if instance.loaded_at_s > held.arrival_s:
        held.grace_s = instance.loaded_at_s - max(held.arrival_s, instance.load_started_s)
    tokens = min(held.request.tokens_max, instance.context_tokens_max)
    held.reserved_blocks = instance.footprint.blocks_for(tokens)
    instance.reserved_blocks += held.reserved_blocks
    instance.requests[held.request.request_id] = held
    order = RequestOrder(
        request=held.request,
        attempt=held.attempt,
        output_tokens=tuple(held.output_tokens),
        slo=entry.spec.slo,
        age_s=turn.now_s - held.arrival_s,
        grace_s=held.grace_s,
    )
    command = SubmitRequest(instance_id=instance.instance_id, order=order)
    turn.act(SendCommand(link_id=instance.node.link_id, command=command))


def _scale_out(turn: Turn, entry: DeploymentEntry) -> None:
    """Requests wait: load another instance, unless one is coming that will hold them all."""
    coming = sum(i.batch_max for i in entry.instances.values() if i.state is InstanceState.LOADING)
    full = entry.replicas() >= entry.spec.scaling.replicas_max
    if full or coming >= len(entry.queue) or turn.now_s < entry.paused_until_s:
        return
    lacking = start_instance(turn, entry)
    if lacking is not None and lacking.in_vain and lacking.largest_bytes and not entry.instances:
        message = (
            f"{entry.spec.name!r} needs {format_bytes(lacking.needed_bytes)} on a node; "
            f"the largest has {format_bytes(lacking.largest_bytes)}"
        )
        hint = "lower spec.context_tokens_max, or start a node with more --memory"
        refuse_all_queued(turn, entry, RefusalReason.MEMORY_FULL, message, hint)


def expire(turn: Turn, expired: QueueWaitExpired) -> None:
    """A request has waited as long as it may."""
    held = turn.cell.requests.get(expired.request_id)
    if held is None or held.state is not RequestState.QUEUED:
        return
    if held.queued_at_s != expired.queued_at_s:
        return
    entry = turn.cell.deployments[held.request.deployment]
    waited = f"{turn.now_s - held.queued_at_s:.1f} s"
    if not has_node(turn, entry):
        reason, message = RefusalReason.NO_NODE, f"no node came up within {waited}"
        if held.attempt:
            reason = RefusalReason.NODE_LOST
            message = f"its node was lost, and no other came up within {waited}"
    elif entry.load_failures:
        reason = RefusalReason.LOAD_FAILED
        message = f"not loaded within {waited}: {entry.load_error}"
    else:
        reason, message = RefusalReason.QUEUE_TIMEOUT, f"no place came free within {waited}"
    refuse(turn, held, reason, message, retry=True)


def has_node(turn: Turn, entry: DeploymentEntry) -> bool:
    """Whether any node that takes new work may hold the deployment."""
    return any(
        node.state is NodeState.READY and node.device in entry.spec.devices
        for node in turn.cell.nodes.values()
    )


def tell_waiting(turn: Turn, entry: DeploymentEntry, phase: str, share: float) -> None:
    for held in entry.queue:
        turn.act(TellWaiting(request_id=held.request.request_id, phase=phase, share=share))
