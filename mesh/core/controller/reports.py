"""What nodes report, taken over into the books: tokens, heartbeats, and what came of commands.

Each report goes to the module that decides what follows from it: tokens and returned requests to
`requests`, imports and profiles to the operator's call that asked for them. What comes of loads and
resizes is taken over here: sizes, footprints, how long loads took, and promises that a node cannot
keep. Before: a message on a node's link. After: `core` places what has become possible.
"""

from typing import assert_never

from mesh.compute.correction import share_trials
from mesh.core.controller.deployments import import_done
from mesh.core.controller.instances.kv_cache import park_cache, shrink
from mesh.core.controller.instances.lifecycle import adopt, forget, unload
from mesh.core.controller.instances.node_schedule import plan_load
from mesh.core.controller.instances.prefetching import import_ended
from mesh.core.controller.instances.reservations import send_started, unload_loaded
from mesh.core.controller.nodes import drain
from mesh.core.controller.operations import failed_on_node, progress
from mesh.core.controller.profiling import profile_done, profile_refined, tell_of_load
from mesh.core.controller.requests.ending import refuse_all_queued
from mesh.core.controller.requests.migration import computed_ahead, kv_arrived
from mesh.core.controller.requests.queueing import tell_waiting
from mesh.core.controller.requests.replicas import room_changed
from mesh.core.controller.requests.serving import deliver, grow_or_evict, miss, requeue, returned
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.energy import Energy, EnergyView
from mesh.domain.events import RetryLoadDue
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.messages import (
    ComputedAhead,
    Heartbeat,
    ImportDone,
    ImportFailed,
    ImportProgress,
    InstanceGone,
    InstanceLoaded,
    KvArrived,
    KvResized,
    LoadFailed,
    LoadProgress,
    NodeHello,
    NodeReport,
    PrefixesChanged,
    PrefixMissed,
    ProfileDone,
    ProfileFailed,
    ProfileProgress,
    ProfileRefined,
    RequestReturned,
    TokensReport,
    UnloadInstance,
)
from mesh.domain.reasons import RefusalReason
from mesh.domain.steps import HeldModel, LoadTier
from mesh.memory.station import ReservationKind

EASED_SHARE = 0.95
"""A node has less to compute once its iterations take less than this share of what they did."""


def take_in(ctx: EventContext, link_id: int, report: NodeReport) -> None:
    """Whatever a node reports. Reports on a link that is not its node's any more mean nothing."""
    node = ctx.cell.links.get(link_id)
    if node is None:
        return
    node.seen(ctx.now_s)
    match report:
        case TokensReport():
            _note_computed(ctx, node, report)
            for outputs in report.outputs:
                deliver(ctx, outputs)
            _note_iteration(ctx, node, report)
        case Heartbeat():
            _heartbeat(ctx, node, report)
        case RequestReturned():
            returned(ctx, report)
        case ComputedAhead():
            computed_ahead(ctx, report)
        case KvArrived():
            kv_arrived(ctx, node, report)
        case PrefixesChanged():
            holder = node.instances.get(report.instance_id)
            if holder is not None:
                holder.note_prefixes(report.change)
            elif report.left_to is not None:
                node.note_left(report.left_to, report.change)
        case PrefixMissed():
            miss(ctx, report)
        case InstanceLoaded():
            _loaded(ctx, node, report)
        case InstanceGone():
            _gone(ctx, report)
        case KvResized():
            resized(ctx, node, report)
        case LoadFailed():
            _load_failed(ctx, report)
        case LoadProgress():
            _load_progress(ctx, report)
        case ImportProgress() | ProfileProgress():
            progress(ctx, report)
        case ImportDone():
            import_ended(ctx, node, report)
            import_done(ctx, report)
        case ProfileDone():
            profile_done(ctx, report)
        case ProfileRefined():
            profile_refined(ctx, report)
        case ImportFailed() | ProfileFailed():
            if isinstance(report, ImportFailed):
                import_ended(ctx, node, report)
            failed_on_node(ctx, report)
        case NodeHello():
            pass  # only the first message of a link may be one; the link has dealt with it
        case _:
            assert_never(report)


def _note_computed(ctx: EventContext, node: NodeEntry, report: TokensReport) -> None:
    """An iteration took its node's time, unless its instance has best effort alone, which takes
    only what all others leave; beside requests with limits it counts as theirs. To be called while
    its requests are there: without any, the node computes nothing.
    """
    instance = node.instances.get(report.instance_id)
    if instance is None:
        return
    for request in instance.requests.values():
        if not request.slo.best_effort:
            node.note_computed(instance.deployment, ctx.now_s)
            return


def _note_iteration(ctx: EventContext, node: NodeEntry, report: TokensReport) -> None:
    """An iteration has ended, and if there is work the next one began at once."""
    instance = node.instances.get(report.instance_id)
    node.note_iteration(ctx.now_s)
    if instance is None:
        return
    if report.busy_s:
        node.energy_book.note(
            instance.deployment,
            sum(report.busy_s),
            requests=sum(outputs.finish is not None for outputs in report.outputs),
            output_tokens=sum(len(outputs.token_ids) for outputs in report.outputs),
        )
    if report.correction < instance.correction.latest * EASED_SHARE:
        node.touch()
    slower = report.correction >= 1.0
    beside_load = instance.correction.trial_left > 0 and slower and node.is_loading()
    on_trial = instance.correction.trial_left
    instance.correction.reported(report.correction, ctx.now_s, beside_load=beside_load)
    if on_trial and not instance.correction.trial_left:
        share_trials(node.instances.values(), ctx.now_s)
        ctx.cell.note_speed()
    for request_id, tokens in report.prefill_left:
        request = instance.requests.get(request_id)
        if request is not None:
            request.note_prefill_left(tokens)
    if report.starved and any(request_id in instance.requests for request_id in report.starved):
        grow_or_evict(ctx, instance)


def _heartbeat(ctx: EventContext, node: NodeEntry, report: Heartbeat) -> None:
    """Bring the books in line with what is loaded. An instance that the node does not list serves
    no more: it broke. The node gives its requests back, and says when its memory is free.
    """
    node.note_heartbeat(report)
    if report.energy is not None:
        _share_out(ctx, node, report.energy)
    if report.models is not None:
        expect_loads(ctx, node)
    listed = {loaded.instance_id for loaded in report.instances}
    for instance in node.instances.values():
        serves = instance.is_loaded or instance.state is InstanceState.DRAINING
        if serves and instance.instance_id not in listed:
            unload(ctx, instance)
            if not instance.has_served:
                message = f"{instance.instance_id} ended by itself before its first token"
                _note_failure(ctx, instance, message, "see `mesh logs`")
    for loaded in report.instances:
        known = ctx.cell.instances.get(loaded.instance_id)
        if known is None:
            adopt(ctx, node, loaded)
        else:
            known.note_report(loaded, ctx.now_s)
            take_over(ctx, known, loaded.kv_blocks)
    restore(ctx, node)
    if report.leaves and node.state is NodeState.READY:
        drain(ctx, node)


def _share_out(ctx: EventContext, node: NodeEntry, energy: Energy) -> None:
    """Charge deployments with what their requests took of the node's joules."""
    took = node.energy_book.settle(energy)
    for name, taken in took.items():
        if name in ctx.cell.deployments:
            ctx.cell.deployments[name].note_energy(taken)
    told = EnergyView(
        sources=() if energy.source is None else (energy.source,),
        reason=energy.reason,
        idle_j=energy.idle_j,
        busy_j=energy.busy_j,
        requests=sum(taken.requests for taken in took.values()),
        output_tokens=sum(taken.output_tokens for taken in took.values()),
    )
    node.note_energy(told, energy.busy_s, ctx.now_s)
    ctx.cell.note_energy(told)


def _loaded(ctx: EventContext, node: NodeEntry, report: InstanceLoaded) -> None:
    instance = ctx.cell.instances.get(report.instance_id)
    if instance is None:
        ctx.send(node, UnloadInstance(instance_id=report.instance_id))
        return
    fits = take_over_size(ctx, instance, report)
    if instance.state is not InstanceState.LOADING:
        return
    note_loaded(ctx, instance, report)
    share_trials(node.instances.values(), ctx.now_s)
    ctx.wake(instance.deployment)
    if fits:
        ctx.note_released(instance)
    else:
        unload(ctx, instance)


def _load_progress(ctx: EventContext, report: LoadProgress) -> None:
    instance = ctx.cell.instances.get(report.instance_id)
    if instance is not None and instance.state is InstanceState.LOADING:
        instance.note_progress(report.phase, report.share)
        owner = ctx.cell.deployments.get(instance.deployment)
        if owner is not None:
            tell_waiting(ctx, owner, report.phase, report.share)
        tell_of_load(ctx, instance, report)


def _load_failed(ctx: EventContext, report: LoadFailed) -> None:
    instance = ctx.cell.instances.get(report.instance_id)
    if instance is not None:
        given_up = instance.state is InstanceState.UNLOADING
        forget(ctx, instance)
        if not given_up:
            _note_failure(ctx, instance, report.message, report.hint)
        room_changed(ctx)


def _gone(ctx: EventContext, report: InstanceGone) -> None:
    instance = ctx.cell.instances.get(report.instance_id)
    if instance is None:
        return
    requests, loading = list(instance.requests.values()), instance.state is InstanceState.LOADING
    forget(ctx, instance)
    for request in requests:
        requeue(ctx, request, RefusalReason.ENGINE_FAILED, report.message or "its instance is gone")
    if loading and report.error:
        _note_failure(ctx, instance, report.message, "see `mesh logs`")
    elif not report.error and instance.deployment in ctx.cell.deployments:
        ctx.cell.deployments[instance.deployment].forgive_loads()
    room_changed(ctx)


def _note_failure(ctx: EventContext, instance: InstanceEntry, message: str, hint: str) -> None:
    if instance.prefetched:
        # Whoever calls has the load tried for himself.
        instance.node.prefetches.note_failed(instance.model_id)
        return
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is None:
        return
    note_load_failure(ctx, owner, instance.node, message)
    if owner.load_failures >= ctx.limits.load_attempts_max and not owner.replicas():
        told = f"{owner.load_failures} loads failed in a row, the last so: {message}"
        again_s = owner.pause_left_s(ctx.now_s)
        reason = RefusalReason.LOAD_FAILED
        refuse_all_queued(ctx, owner, reason, told, retry_after_s=again_s, hint=hint)


def load_expired(ctx: EventContext, instance_id: InstanceId) -> None:
    """A load that never ends: give it up. Its memory stays booked until the node lets go of it."""
    instance = ctx.cell.instances.get(instance_id)
    if instance is not None and instance.state is InstanceState.LOADING:
        unload(ctx, instance)
        message = f"{instance_id} was not loaded within {ctx.limits.load_s_max:.0f} s"
        _note_failure(ctx, instance, message, "see `mesh logs`")


def resized(ctx: EventContext, node: NodeEntry, report: KvResized) -> None:
    """A resize has ended, as wanted or not. What a failed grow was for is served from the blocks
    that there are, or evicted when they do not do: it is tried again only after a pause.
    """
    instance = ctx.cell.instances.get(report.instance_id)
    if instance is None:
        return
    size = instance.footprint.size(report.kv_blocks)
    if report.kv_blocks > instance.kv_blocks:
        node.note_grown(size.kv_bytes, report.elapsed_s)
    instance.note_size(report.kv_blocks)
    asked = node.station.running(instance.instance_id)
    if asked is not None and size.kv_bytes < asked.size.kv_bytes:
        instance.note_grow_failed(ctx.now_s + ctx.limits.grow_retry_s)
    send_started(ctx, node, node.station.done(instance.instance_id, size))
    ctx.wake_all()


def take_over(ctx: EventContext, instance: InstanceEntry, kv_blocks: int) -> None:
    """A heartbeat says how large a cache is: another size than the books have if an earlier link
    had asked for a resize. What is under way here answers for itself.
    """
    station = instance.node.station
    if kv_blocks != instance.kv_blocks and not station.running(instance.instance_id):
        instance.note_size(kv_blocks)
        size = instance.footprint.size(kv_blocks)
        send_started(ctx, instance.node, station.record(instance.instance_id, size))
        ctx.wake_all()


def restore(ctx: EventContext, node: NodeEntry) -> None:
    """Bring what is promised below the capacity again, if it is above: a shrink has failed, or
    stopped at blocks in use, or a node came with more loaded than it has. What waits in the station
    would else wait forever. Whatever is too large is asked to shrink again; if that does not do,
    idle instances go, and then what waits is taken back, the least urgent first.
    """
    station = node.station
    if station.free_bytes >= 0:
        return
    for instance in node.instances.values():
        if not station.is_pending(instance.instance_id):
            shrink(ctx, instance)
            park_cache(ctx, instance)
    idle = node.idle_instances(ctx.now_s)
    # Where all are idle, one stays: the next request would have it loaded again, at the same size.
    spared = 1 if len(idle) == len(node.instances) else 0
    for instance in idle[: len(idle) - spared]:
        if station.free_bytes < 0:
            unload_loaded(ctx, instance)
    for reservation in reversed(station.waiting()):
        if station.free_bytes >= 0:
            return
        instance = node.instances[reservation.instance_id]
        match reservation.kind:
            case ReservationKind.LOAD | ReservationKind.WAKE | ReservationKind.IMPORT:
                unload(ctx, instance)
                if instance.deployment in ctx.cell.deployments:
                    # Its deployment may be below its minimum now.
                    ctx.cell.note_minimum(instance.deployment, lacking=True)
            case ReservationKind.RESIZE if station.takes_memory(reservation):
                send_started(ctx, node, station.cancel(instance.instance_id))
            case ReservationKind.RESIZE | ReservationKind.UNLOAD:
                pass


def take_over_size(ctx: EventContext, instance: InstanceEntry, report: InstanceLoaded) -> bool:
    """Enter what a load has led to. The engine of the node that imported a model has stated its
    footprint there; what another engine takes for it is an estimate, which may be too little by
    multiples, until the first instance is there. False where its size was an estimate, and
    there is no room for what it came to: it has to go, and the next one knows. One that went by
    what is known stays: the next one would come out no smaller.
    """
    node, promised = instance.node, instance.footprint
    instance.note_size(report.kv_blocks, report.footprint)
    size = report.footprint.size(report.kv_blocks)
    smaller, free_bytes = size.bytes < instance.promised_bytes, node.free_bytes
    started = node.station.done(instance.instance_id, size, instance.shared_weights)
    send_started(ctx, node, started)
    if smaller or node.free_bytes > free_bytes:
        ctx.wake_all()
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is None or owner.deployment is None:
        return True
    owner.note_footprint(node.hello.engine, report.footprint)
    # Another instance may have said it while this one was loading.
    known = node.footprint_of(owner.deployment)
    estimated = promised != known.at_context(instance.context_tokens_max)
    node.note_footprint(owner.deployment.model, report.footprint)
    return not (estimated and node.free_bytes < 0)


def note_loaded(ctx: EventContext, instance: InstanceEntry, report: InstanceLoaded) -> None:
    node, model_id = instance.node, instance.model_id
    instance.note_loaded(report.tier, ctx.now_s)
    instance.note_all_prefixes(report.prefixes)
    # What the node has told of since the load began is of what this one found.
    node.take_left(instance.deployment)
    weights_bytes = node.load_bytes(instance.footprint.weights_bytes, report.tier)
    ctx.cell.expectations.learn_load(
        node.hello, weights_bytes, report.elapsed_s, report.tier, computed_s=report.computed_s
    )
    owner = ctx.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.note_loaded()
    if report.tier is LoadTier.REMOTE:
        node.note_stored(model_id)
    elif report.tier is LoadTier.HOST:
        context_tokens_max = instance.context_tokens_max
        held = HeldModel(model_id=model_id, tier=report.tier, context_tokens_max=context_tokens_max)
        node.note_woken(held)


def expect_loads(ctx: EventContext, node: NodeEntry) -> None:
    """The node has said which models it has at hand: of loads that wait for their turn some may
    come from nearer than when they were issued. A shape that the first of them has compiled is
    what the others import.
    """
    for instance in node.instances.values():
        owner = ctx.cell.deployments.get(instance.deployment)
        kind = node.station.load_kind(instance.instance_id)
        if instance.state is not InstanceState.LOADING or kind is None:
            continue
        if node.station.running(instance.instance_id) or owner is None or owner.deployment is None:
            continue
        planned = plan_load(ctx, owner.deployment, node)
        if planned.kind is kind:
            instance.plan_load(planned.load_s)


def note_load_failure(
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, message: str
) -> None:
    """Remember a failed load, and try again after its pause."""
    entry.note_load_failure(node.node_id, message, ctx.now_s, ctx.limits)
    ctx.set_timer(entry.paused_until_s, RetryLoadDue(name=entry.spec.name))
