"""Instances on a node: loads, resizes, unloads, and what a lost link leaves."""

from mesh.compute.correction import share_trials
from mesh.compute.learned_correction import LearnedCorrection
from mesh.core.node import measuring
from mesh.core.node.context import NodeEventContext
from mesh.core.node.local_instance import LocalInstance, LocalState
from mesh.core.node.request import LocalRequest
from mesh.core.node.state import LocalNode
from mesh.domain.actions import AbortInEngine, StartLoad, StartResize, StartUnload, StopImport
from mesh.domain.ids import InstanceId
from mesh.domain.messages import (
    InstanceGone,
    InstanceLoaded,
    KvResized,
    LoadFailed,
    LoadInstance,
    LoadProgress,
    RequestReturned,
    ResizeKv,
)
from mesh.domain.node_events import (
    LoadBroke,
    LoadFinished,
    LoadProgressed,
    ResizeBroke,
    ResizeFinished,
    UnloadFinished,
)


def load(ctx: NodeEventContext, node: LocalNode, command: LoadInstance) -> None:
    if command.instance_id in node.instances:
        message = f"{command.instance_id} is on this node already"
        failed = LoadFailed(instance_id=command.instance_id, error="AlreadyExists", message=message)
        ctx.report(failed)
        return
    instance = LocalInstance(
        command=command, profile=command.profile, correction=LearnedCorrection.of(command.profile)
    )
    node.add(instance)
    if not node.has_unbooked():
        _start_load(ctx, node, instance)


def _start_load(ctx: NodeEventContext, node: LocalNode, instance: LocalInstance) -> None:
    command = instance.command
    node.begin_load(instance, ctx.now_s)
    ctx.engine(
        StartLoad(
            instance_id=command.instance_id,
            deployment=command.deployment,
            model=command.model,
            kv_blocks=command.kv_blocks,
            context_tokens_max=command.context_tokens_max,
            batch_max=command.batch_max,
        )
    )


def _gone(ctx: NodeEventContext, node: LocalNode, instance: LocalInstance) -> None:
    """Its memory is free. With the last that was in nobody's books, loads and grows that wait
    begin.
    """
    node.remove(instance)
    if node.has_unbooked():
        return
    for other in node.instances.values():
        if other.state is LocalState.WAITING:
            _start_load(ctx, node, other)
        elif other.state is LocalState.READY and other.growth_waiting is not None:
            _start_resize(ctx, other, other.growth_waiting)


def unload(ctx: NodeEventContext, node: LocalNode, instance_id: InstanceId) -> None:
    instance = node.instances.get(instance_id)
    if instance is None:
        ctx.report(InstanceGone(instance_id=instance_id))
    elif instance.state is LocalState.WAITING:
        node.remove(instance)
        ctx.report(InstanceGone(instance_id=instance_id))
    elif instance.state is LocalState.LOADING:
        instance.abandon()
    elif instance.state is LocalState.READY:
        for request in list(instance.requests.values()):
            returned = RequestReturned(
                request_id=request.request_id,
                attempt=request.order.attempt,
                error="Unavailable",
                message=f"{instance_id} was unloaded",
            )
            drop(ctx, instance, request)
            ctx.report(returned)
        instance.leave()
        measuring.stop(ctx, node, instance)
        ctx.engine(StartUnload(instance_id=instance_id))


def resize(ctx: NodeEventContext, node: LocalNode, command: ResizeKv) -> None:
    """Resizes run between two iterations, in the order of the commands. A grow waits while memory
    is in nobody's books. An instance that is about to go tells of its end instead.
    """
    instance = node.instances.get(command.instance_id)
    if instance is None:
        ctx.report(InstanceGone(instance_id=command.instance_id))
    elif instance.state is LocalState.READY:
        grows = command.kv_blocks > instance.kv_blocks_next
        if grows and node.has_unbooked():
            instance.wait_to_grow(command.kv_blocks)
        else:
            _start_resize(ctx, instance, command.kv_blocks)


def _start_resize(ctx: NodeEventContext, instance: LocalInstance, kv_blocks: int) -> None:
    instance.begin_resize(kv_blocks)
    ctx.engine(StartResize(instance_id=instance.instance_id, kv_blocks=kv_blocks))


def resized(ctx: NodeEventContext, node: LocalNode, event: ResizeFinished | ResizeBroke) -> None:
    """The oldest resize under way has ended. If an earlier link asked for it, a heartbeat tells of
    it: KvResized would be taken for the end of a resize that this link has asked for.
    """
    instance = node.instances.get(event.instance_id)
    if instance is None:
        return
    kv_blocks, elapsed_s, error, message = instance.kv_blocks, 0.0, "", ""
    match event:
        case ResizeFinished():
            kv_blocks, elapsed_s = event.kv_blocks, event.elapsed_s
        case ResizeBroke():
            error, message = event.error, event.message
    if not instance.end_resize(kv_blocks):
        ctx.report(node.heartbeat(ctx.now_s))
        return
    ctx.report(
        KvResized(
            instance_id=event.instance_id,
            kv_blocks=kv_blocks,
            elapsed_s=elapsed_s,
            error=error,
            message=message,
        )
    )


def loading(
    ctx: NodeEventContext,
    node: LocalNode,
    event: LoadProgressed | LoadFinished | LoadBroke | UnloadFinished,
) -> None:
    instance = node.instances.get(event.instance_id)
    if instance is None:
        return
    computed_s = 0.0
    if isinstance(event, LoadFinished | LoadBroke):
        tier = event.loaded.tier if isinstance(event, LoadFinished) else None
        computed_s = node.end_load(instance, tier, ctx.now_s)
    instance_id = event.instance_id
    match event:
        case LoadProgressed():
            ctx.report(LoadProgress(instance_id=instance_id, phase=event.phase, share=event.share))
        case LoadFinished() if instance.state is LocalState.ABANDONED:
            instance.leave()
            ctx.engine(StartUnload(instance_id=instance_id))
        case LoadFinished():
            loaded = event.loaded
            instance.note_loaded(loaded.footprint, loaded.kv_blocks)
            share_trials(node.instances.values(), ctx.now_s)
            ctx.report(
                InstanceLoaded(
                    instance_id=instance_id,
                    footprint=loaded.footprint,
                    kv_blocks=loaded.kv_blocks,
                    elapsed_s=loaded.elapsed_s,
                    tier=loaded.tier,
                    computed_s=computed_s,
                )
            )
        case LoadBroke():
            _gone(ctx, node, instance)
            ctx.report(
                LoadFailed(
                    instance_id=instance_id,
                    error=event.error,
                    message=event.message,
                    hint=event.hint,
                )
            )
        case UnloadFinished():
            _gone(ctx, node, instance)
            ctx.report(
                InstanceGone(
                    instance_id=instance_id, error=instance.error, message=instance.message
                )
            )


def abandon(ctx: NodeEventContext, node: LocalNode) -> None:
    """The link is gone: nobody waits for the requests and imports, and the controller will
    know nothing of what loads or leaves. What is loaded stays, for the next link.
    """
    for operation_id in node.imports:
        ctx.engine(StopImport(operation_id=operation_id))
    node.link_closed()
    for instance in node.instances.values():
        for request in list(instance.requests.values()):
            drop(ctx, instance, request)


def drop(ctx: NodeEventContext, instance: LocalInstance, request: LocalRequest) -> None:
    """Take a request off its instance; it frees its place within the iteration under way."""
    instance.remove(request)
    instance.encourage()
    ctx.engine(AbortInEngine(instance_id=instance.instance_id, request_id=request.request_id))
