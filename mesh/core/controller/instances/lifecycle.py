"""The life of instances as the controller decides it: start, ready, idle, unload, gone."""

from mesh.compute.correction import Correction
from mesh.core.controller.instances.kv_cache import Room, batch_max
from mesh.core.controller.instances.node_schedule import PlannedLoad
from mesh.core.controller.instances.pricing import Price
from mesh.core.controller.instances.reservations import (
    issue,
    send_started,
    unload_idle,
    unload_loaded,
)
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.events import KeepAliveExpired, LoadExpired
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.messages import (
    CancelImport,
    InstanceReport,
    LoadInstance,
    UnloadInstance,
    UseProfile,
)
from mesh.domain.profile import Profile
from mesh.policy.plans import Start


def start(ctx: EventContext, price: Price) -> InstanceEntry:
    """Load an instance at this price."""
    assert price.room is not None
    planned, needed_s = price.slot.load, price.needed_s()
    asked = price.request is not None
    instance = load(ctx, price.entry, price.node, price.room, planned, needed_s, asked=asked)
    instance.note_label(price.plan.label if isinstance(price.plan, Start) else "")
    return instance


def load(
    ctx: EventContext,
    entry: DeploymentEntry,
    node: NodeEntry,
    room: Room,
    planned: PlannedLoad,
    needed_s: float,
    *,
    asked: bool,
    prefetched: bool = False,
) -> InstanceEntry:
    """Load an instance where there is room for it, by `needed_s`: for a request where somebody has
    `asked`, else for a minimum, an operator or a policy. One that is `prefetched` is loaded before
    anybody calls.
    """
    deployment = entry.made
    footprint = node.footprint_of(deployment)
    nearer = node.prefetches.take(deployment.model.model_id)
    if not prefetched:
        ctx.cell.prefetches.note_load(nearer=nearer, needed=asked, felt=asked)
        _cancel_import_ahead(ctx, node)
    unload_idle(ctx, node, room.unloads)
    profile = ctx.cell.profile_on(node, deployment)
    instance_id = InstanceId(f"{entry.spec.name}-{ctx.epoch}-{ctx.cell.number_instance()}")
    served_max = batch_max(ctx, entry, node)
    to_load = LoadInstance(
        instance_id=instance_id,
        deployment=entry.spec.name,
        model=deployment.model,
        kv_blocks=room.kv_blocks,
        context_tokens_max=deployment.context_tokens_max,
        batch_max=served_max,
        profile=profile,
    )
    instance = InstanceEntry(
        instance_id=instance_id,
        deployment=entry.spec.name,
        model_id=deployment.model.model_id,
        node=node,
        state=InstanceState.LOADING,
        footprint=footprint,
        profile=profile,
        kv_blocks=room.kv_blocks,
        context_tokens_max=deployment.context_tokens_max,
        batch_max=served_max,
        correction=Correction.of(profile),
        to_load=to_load,
        load_s=planned.load_s,
        needed_s=needed_s,
        prefetched=prefetched,
        load_started_s=ctx.now_s,
        phase="load",
        prefixes=node.take_left(entry.spec.name),
    )
    ctx.cell.add_instance(instance)
    issue(ctx, instance, planned.kind, footprint.size(room.kv_blocks), needed_s)
    ctx.set_timer(ctx.now_s + ctx.limits.load_s_max, LoadExpired(instance_id=instance_id))
    return instance


def _cancel_import_ahead(ctx: EventContext, node: NodeEntry) -> None:
    """A load that somebody needs has the node's disk and its cores for itself. An import of its own
    model, which it would begin itself, it has taken over.
    """
    ahead = node.prefetches.importing
    if ahead is not None:
        node.prefetches.cancel()
        ctx.cell.prefetches.note_wasted()
        ctx.send(node, CancelImport(operation_id=ahead.operation_id))


def adopt(
    ctx: EventContext, node: NodeEntry, report: InstanceReport, *, busy: bool = False
) -> None:
    """Take an instance that a node reports into the books; unload it if no deployment wants it.
    One that is `busy` may get requests yet in this event, and is idle only without them.
    """
    owner = ctx.cell.deployments.get(report.deployment)
    wanted = (
        owner is not None
        and owner.deployment is not None
        and node.device in ctx.policy.devices
        and owner.deployment.model.model_id == report.model_id
        and owner.deployment.context_tokens_max == report.context_tokens_max
        and report.instance_id not in ctx.cell.instances
        and sum(i.node is node for i in owner.instances.values()) < ctx.policy.instances_per_node
    )
    if report.instance_id in ctx.cell.instances:
        ctx.send(node, UnloadInstance(instance_id=report.instance_id))
        return
    profile = _profile(ctx, node, report) if wanted else None
    instance = InstanceEntry(
        instance_id=report.instance_id,
        deployment=report.deployment,
        model_id=report.model_id,
        node=node,
        state=InstanceState.READY,
        footprint=report.footprint,
        profile=profile,
        correction=Correction.of(profile) if profile else Correction(),
        kv_blocks=report.kv_blocks,
        context_tokens_max=report.context_tokens_max,
        batch_max=_served_max(ctx, owner, node, report),
        load_started_s=ctx.now_s,
        loaded_at_s=ctx.now_s,
    )
    instance.note_report(report, ctx.now_s)
    instance.note_all_prefixes(report.prefixes)
    if owner is not None and instance.profile is not None:
        owner.note_footprint(node.hello.engine, report.footprint)
    ctx.cell.add_instance(instance)
    size = report.footprint.size(report.kv_blocks)
    started = node.station.record(instance.instance_id, size, instance.shared_weights)
    send_started(ctx, node, started)
    if instance.profile is None:
        unload_loaded(ctx, instance)
        return
    ctx.send(node, UseProfile(instance_id=instance.instance_id, profile=instance.profile))
    if not busy:
        note_idle(ctx, instance)


def _profile(ctx: EventContext, node: NodeEntry, report: InstanceReport) -> Profile:
    model = ctx.cell.deployments[report.deployment].made.model
    return ctx.cell.expectations.profile(model, report.footprint, node.hello)


def _served_max(
    ctx: EventContext, owner: DeploymentEntry | None, node: NodeEntry, report: InstanceReport
) -> int:
    """Requests that it may have at a time: it may have been loaded under another policy."""
    if owner is None or owner.deployment is None:
        return report.batch_max
    return min(report.batch_max, batch_max(ctx, owner, node))


def note_idle(ctx: EventContext, instance: InstanceEntry) -> None:
    """An instance has no request: unload it now if it is draining, else after its keep-alive."""
    instance.note_idle(ctx.now_s)
    if instance.state is InstanceState.DRAINING or instance.node.state is NodeState.DRAINING:
        unload(ctx, instance)
        return
    owner = ctx.cell.deployments.get(instance.deployment)
    keep_alive_s = owner.spec.scaling.keep_alive_s if owner else 0.0
    timer = KeepAliveExpired(instance_id=instance.instance_id, idle_since_s=ctx.now_s)
    ctx.set_timer(ctx.now_s + keep_alive_s, timer)


def unload(ctx: EventContext, instance: InstanceEntry) -> None:
    """Let an instance go. A load that its node has begun is given up: nobody knows when the node
    lets go of its memory, so it stays promised until then. One that waits for memory never begins.
    """
    match instance.state:
        case InstanceState.UNLOADING:
            pass
        case InstanceState.LOADING if instance.node.station.running(instance.instance_id):
            instance.note_unloading()
            # The cache that those who waited for it were to have after the load.
            send_started(ctx, instance.node, instance.node.station.cancel(instance.instance_id))
            ctx.send(instance.node, UnloadInstance(instance_id=instance.instance_id))
            ctx.wake_all()
        case InstanceState.LOADING:
            forget(ctx, instance)
            ctx.wake_all()
        case _:
            unload_loaded(ctx, instance)


def drain(ctx: EventContext, instance: InstanceEntry) -> None:
    """No new requests; it goes when its last one ends."""
    if instance.state is InstanceState.LOADING:
        unload(ctx, instance)
    elif instance.state is InstanceState.READY and instance.requests:
        instance.expect_nobody()
        instance.advance(InstanceState.DRAINING)
    elif instance.is_loaded:
        unload(ctx, instance)


def forget(ctx: EventContext, instance: InstanceEntry) -> None:
    """The instance is gone: give its memory back and take it out of every book."""
    ctx.cell.remove_instance(instance)
    if instance.profile is not None and not instance.correction.trial_left:
        ctx.cell.expectations.learn_estimate(instance.profile, instance.correction.latest)
    send_started(ctx, instance.node, instance.node.station.forget(instance.instance_id))
