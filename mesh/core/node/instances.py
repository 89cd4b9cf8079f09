"""Instances on a node: loads, resizes, unloads, and what a lost link leaves."""

from collections.abc import Sequence

from mesh.compute.correction import share_trials
from mesh.compute.learned_correction import LearnedCorrection
from mesh.core.node import measuring
from mesh.core.node.context import NodeEventContext
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.request import LocalRequest
from mesh.core.node.state import LocalNode
from mesh.domain.actions import AbortInEngine
from mesh.domain.ids import InstanceId
from mesh.domain.messages import (
    CancelImport,
    HeldRequest,
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    LoadProgress,
    ResizeKv,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.node_rule import Adopted
from mesh.domain.values import replace


def load(ctx: NodeEventContext, node: LocalNode, command: LoadInstance) -> None:
    if command.instance_id in node.instances:
        message = f"{command.instance_id} is on this node already"
        failed = LoadFailed(instance_id=command.instance_id, error="AlreadyExists", message=message)
        ctx.report(failed)
        return
    instance = LocalInstance(
        command=command, profile=command.profile, correction=LearnedCorrection.of(command.profile)
    )
    more_bytes = command.swapped_bytes
    waits = node.waits(more_bytes)
    node.add(instance)
    if not waits:
        _start_load(ctx, node, instance)


def _start_load(ctx: NodeEventContext, node: LocalNode, instance: LocalInstance) -> None:
    node.begin_load(instance, ctx.now_s)
    ctx.engine(instance.command)


def _remove(ctx: NodeEventContext, node: LocalNode, instance: LocalInstance) -> None:
    """Its memory is free."""
    node.remove(instance)
    begin_waiting(ctx, node)


def begin_waiting(ctx: NodeEventContext, node: LocalNode) -> None:
    """Begin loads and resizes that wait, as far as there is memory: with the last that was in
    nobody's books, or once weights have made room.
    """
    for other in node.instances.values():
        if other.state is not LocalState.WAITING and other.resize_waiting is None:
            continue
        if not node.resizes_beside_move(other) or node.waits(other.waiting_bytes):
            continue
        if other.state is LocalState.WAITING:
            _start_load(ctx, node, other)
        elif other.state is LocalState.READY and other.resize_waiting is not None:
            _start_resize(ctx, other, other.resize_waiting)


def unload(ctx: NodeEventContext, node: LocalNode, instance_id: InstanceId) -> None:
    instance = node.instances.get(instance_id)
    if instance is None:
        ctx.report(InstanceGone(instance_id=instance_id))
    elif instance.state is LocalState.WAITING:
        node.remove(instance)
        ctx.report(InstanceGone(instance_id=instance_id))
    elif instance.state is LocalState.LOADING:
        instance.unload_when_loaded()
    elif instance.state is LocalState.READY:
        for request in list(instance.requests.values()):
            cancel(ctx, instance, request)
            message = f"{instance_id} was unloaded"
            ctx.give_back(request.request_id, request.order.attempt, message)
        instance.unload()
        measuring.stop(ctx, node, instance)
        start_unload(ctx, node, instance)


def start_unload(ctx: NodeEventContext, node: LocalNode, instance: LocalInstance) -> None:
    """The engine unloads it, once its weights are not on their way."""
    if node.swapping != instance.instance_id:
        ctx.engine(UnloadInstance(instance_id=instance.instance_id))


def resize(ctx: NodeEventContext, node: LocalNode, command: ResizeKv) -> None:
    """Resizes run between two iterations, in the order of the commands. A grow waits while memory
    is in nobody's books or weights have to make room, and any while the instance's own weights are
    on their way as a whole. An instance that is about to go tells of its end instead.
    """
    instance = node.instances.get(command.instance_id)
    if instance is None:
        ctx.report(InstanceGone(instance_id=command.instance_id))
    elif instance.state is LocalState.READY:
        grows = command.kv_blocks > instance.kv_blocks_next
        instance.wait_to_resize(command.kv_blocks)
        waits = grows and node.waits(instance.waiting_bytes)
        if not waits and node.resizes_beside_move(instance):
            _start_resize(ctx, instance, command.kv_blocks)


def _start_resize(ctx: NodeEventContext, instance: LocalInstance, kv_blocks: int) -> None:
    instance.begin_resize(kv_blocks)
    ctx.engine(ResizeKv(instance_id=instance.instance_id, kv_blocks=kv_blocks))


def resized(ctx: NodeEventContext, node: LocalNode, event: KvResized) -> None:
    """The oldest resize under way has ended. If an earlier link asked for it, a heartbeat tells of
    it: KvResized would be taken for the end of a resize that this link has asked for.
    """
    instance = node.instances.get(event.instance_id)
    if instance is None:
        return
    if event.error:
        event = replace(event, kv_blocks=instance.kv_blocks)
    if instance.end_resize(event.kv_blocks):
        ctx.report(event)
    else:
        ctx.report(node.heartbeat(ctx.now_s))


def loading(
    ctx: NodeEventContext,
    node: LocalNode,
    event: LoadProgress | InstanceLoaded | LoadFailed | InstanceGone,
) -> None:
    instance = node.instances.get(event.instance_id)
    if instance is None:
        return
    computed_s = 0.0
    if isinstance(event, InstanceLoaded | LoadFailed):
        tier = event.tier if isinstance(event, InstanceLoaded) else None
        computed_s = node.end_load(instance, tier, ctx.now_s)
    match event:
        case LoadProgress():
            ctx.report(event)
        case InstanceLoaded() if instance.state is LocalState.ABANDONED:
            instance.unload()
            ctx.engine(UnloadInstance(instance_id=event.instance_id))
        case InstanceLoaded():
            instance.note_loaded(event.footprint, event.kv_blocks)
            instance.cache.note_all(event.prefixes)
            node.take_left(instance.command.deployment)
            share_trials(node.instances.values(), ctx.now_s)
            found = tuple(instance.cache.digests)
            ctx.report(replace(event, computed_s=computed_s, prefixes=found))
        case LoadFailed():
            _remove(ctx, node, instance)
            ctx.report(event)
        case InstanceGone():
            _remove(ctx, node, instance)
            ctx.report(replace(event, error=instance.error, message=instance.message))


def close_link(ctx: NodeEventContext, node: LocalNode) -> None:
    """The link is gone: nobody waits for the imports, and the controller will know nothing of what
    loads or leaves. What is loaded stays, for the next link, and so do requests that their clients
    may ask the next controller for.
    """
    for operation_id in node.imports:
        ctx.engine(CancelImport(operation_id=operation_id))
    node.link_closed(ctx.now_s)
    for instance in node.instances.values():
        for request in list(instance.requests.values()):
            if request.held(instance.instance_id, ctx.now_s) is None:
                cancel(ctx, instance, request)


def open_link(ctx: NodeEventContext, node: LocalNode, adopted: Sequence[Adopted]) -> None:
    """Requests that the controller has taken over go on, and it is told what it has not been; the
    others end.
    """
    taken = {(one.request_id, one.attempt): one for one in adopted}

    def tell(held: HeldRequest | None) -> bool:
        if held is None:
            return False
        instance = node.instances.get(held.instance_id)
        # Where it has gone, this is told of no instance.
        correction = 1.0 if instance is None else instance.correction.factor(ctx.now_s)
        one = taken.pop((held.order.request.request_id, held.order.attempt), None)
        if one is None:
            return False
        more = tuple(o for o in held.outputs if o.first_index >= one.next_index)
        if more:
            told = TokensReport(instance_id=held.instance_id, outputs=more, correction=correction)
            ctx.report(told)
        return True

    for instance in node.instances.values():
        for request in list(instance.requests.values()):
            held = request.held(instance.instance_id, ctx.now_s)
            if not tell(held):
                cancel(ctx, instance, request)
    for ended in node.ended.values():
        tell(ended)
    node.forget_ended()
    for one in taken.values():
        message = "its node computed it no more when the controller came"
        ctx.give_back(one.request_id, one.attempt, message)


def end_held(ctx: NodeEventContext, node: LocalNode, hold_s_max: float) -> None:
    """Nobody has come for what was computed on without a controller."""
    if node.linked or ctx.now_s - node.unlinked_s <= hold_s_max:
        return
    for instance in node.instances.values():
        for request in list(instance.requests.values()):
            cancel(ctx, instance, request)
    node.forget_ended()


def cancel(ctx: NodeEventContext, instance: LocalInstance, request: LocalRequest) -> None:
    """Take a request off its instance; it frees its place within the iteration under way."""
    instance.remove(request)
    instance.encourage()
    ctx.engine(AbortInEngine(instance_id=instance.instance_id, request_id=request.request_id))
