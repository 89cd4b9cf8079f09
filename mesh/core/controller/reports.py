"""What nodes report, taken over into the books: tokens, heartbeats, and what came of commands.

Each report goes to the room that decides what follows from it: tokens and returned requests to
`requests`, loads and KV caches to `instances`, imports and profiles to the operator's call that
asked for them. Before: a message on a node's link. After: `core` places what has become possible.
"""

from typing import assert_never

from mesh.compute.correction import share_trials
from mesh.core.controller.deployments import import_done
from mesh.core.controller.instances.kv_reports import resized, restore, take_over
from mesh.core.controller.instances.lifecycle import adopt, forget, unload
from mesh.core.controller.instances.load_reports import (
    expect_loads,
    note_load_failure,
    note_loaded,
    take_over_size,
)
from mesh.core.controller.instances.prefetching import import_ended
from mesh.core.controller.operations import failed_on_node, progress
from mesh.core.controller.profiling import profile_done, profile_refined, tell_of_load
from mesh.core.controller.requests.ending import refuse_all_queued
from mesh.core.controller.requests.migration import computed_ahead, kv_arrived
from mesh.core.controller.requests.queueing import tell_waiting
from mesh.core.controller.requests.replicas import room_changed
from mesh.core.controller.requests.serving import deliver, give_back, miss, relieve, requeue
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.actions import SendCommand
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
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

EASED_SHARE = 0.95
"""A node has less to compute once its iterations take less than this share of what they did."""


def report(ctx: EventContext, link_id: int, said: NodeReport) -> None:
    """Whatever a node says. Reports on a link that is not its node's any more mean nothing."""
    node = ctx.cell.links.get(link_id)
    if node is None:
        return
    node.seen(ctx.now_s)
    match said:
        case TokensReport():
            for outputs in said.outputs:
                deliver(ctx, outputs)
            _note_iteration(ctx, node, said)
        case Heartbeat():
            _heartbeat(ctx, node, said)
        case RequestReturned():
            give_back(ctx, said)
        case ComputedAhead():
            computed_ahead(ctx, said)
        case KvArrived():
            kv_arrived(ctx, node, said)
        case PrefixesChanged():
            holder = node.instances.get(said.instance_id)
            if holder is not None:
                holder.note_prefixes(said.change)
            elif said.left_to is not None:
                node.note_left(said.left_to, said.change)
        case PrefixMissed():
            miss(ctx, said)
        case InstanceLoaded():
            _loaded(ctx, node, said)
        case InstanceGone():
            _gone(ctx, said)
        case KvResized():
            resized(ctx, node, said)
        case LoadFailed():
            _load_failed(ctx, said)
        case LoadProgress():
            _load_progress(ctx, said)
        case ImportProgress() | ProfileProgress():
            progress(ctx, said)
        case ImportDone():
            import_ended(ctx, node, said)
            import_done(ctx, said)
        case ProfileDone():
            profile_done(ctx, said)
        case ProfileRefined():
            profile_refined(ctx, said)
        case ImportFailed() | ProfileFailed():
            if isinstance(said, ImportFailed):
                import_ended(ctx, node, said)
            failed_on_node(ctx, said)
        case NodeHello():
            pass  # only the first message of a link may be one; the link has dealt with it
        case _:
            assert_never(said)


def _note_iteration(ctx: EventContext, node: NodeEntry, said: TokensReport) -> None:
    """An iteration has ended, and if there is work the next one began at once."""
    instance = node.instances.get(said.instance_id)
    node.note_iteration(ctx.now_s)
    if instance is None:
        return
    if said.correction < instance.correction.latest * EASED_SHARE:
        node.touch()
    slower = said.correction >= 1.0
    beside_load = instance.correction.trial_left > 0 and slower and node.is_loading()
    on_trial = instance.correction.trial_left
    instance.correction.reported(said.correction, ctx.now_s, beside_load=beside_load)
    if on_trial and not instance.correction.trial_left:
        share_trials(node.instances.values(), ctx.now_s)
        ctx.cell.note_speed()
    for request_id, tokens in said.prefill_left:
        request = instance.requests.get(request_id)
        if request is not None:
            request.note_prefill_left(tokens)
    if said.starved and any(request_id in instance.requests for request_id in said.starved):
        relieve(ctx, instance)


def _heartbeat(ctx: EventContext, node: NodeEntry, said: Heartbeat) -> None:
    """Bring the books in line with what is loaded. An instance that the node does not list serves
    no more: it broke. The node gives its requests back, and says when its memory is free.
    """
    node.note_heartbeat(said)
    if said.models is not None:
        expect_loads(ctx, node)
    listed = {loaded.instance_id for loaded in said.instances}
    for instance in node.instances.values():
        serves = instance.is_loaded or instance.state is InstanceState.DRAINING
        if serves and instance.instance_id not in listed:
            unload(ctx, instance)
            if not instance.has_served:
                message = f"{instance.instance_id} ended by itself before its first token"
                _note_failure(ctx, instance, message, "see `mesh logs`")
    for loaded in said.instances:
        known = ctx.cell.instances.get(loaded.instance_id)
        if known is None:
            adopt(ctx, node, loaded)
        else:
            known.note_report(loaded, ctx.now_s)
            take_over(ctx, known, loaded.kv_blocks)
    restore(ctx, node)


def _loaded(ctx: EventContext, node: NodeEntry, said: InstanceLoaded) -> None:
    instance = ctx.cell.instances.get(said.instance_id)
    if instance is None:
        command = UnloadInstance(instance_id=said.instance_id)
        ctx.act(SendCommand(link_id=node.link_id, command=command))
        return
    fits = take_over_size(ctx, instance, said)
    if instance.state is not InstanceState.LOADING:
        return
    note_loaded(ctx, instance, said)
    share_trials(node.instances.values(), ctx.now_s)
    ctx.wake(instance.deployment)
    if fits:
        ctx.note_released(instance)
    else:
        unload(ctx, instance)


def _load_progress(ctx: EventContext, said: LoadProgress) -> None:
    instance = ctx.cell.instances.get(said.instance_id)
    if instance is not None and instance.state is InstanceState.LOADING:
        instance.note_progress(said.phase, said.share)
        owner = ctx.cell.deployments.get(instance.deployment)
        if owner is not None:
            tell_waiting(ctx, owner, said.phase, said.share)
        tell_of_load(ctx, instance, said)


def _load_failed(ctx: EventContext, said: LoadFailed) -> None:
    instance = ctx.cell.instances.get(said.instance_id)
    if instance is not None:
        given_up = instance.state is InstanceState.UNLOADING
        forget(ctx, instance)
        if not given_up:
            _note_failure(ctx, instance, said.message, said.hint)
        room_changed(ctx)


def _gone(ctx: EventContext, said: InstanceGone) -> None:
    instance = ctx.cell.instances.get(said.instance_id)
    if instance is None:
        return
    requests, loading = list(instance.requests.values()), instance.state is InstanceState.LOADING
    forget(ctx, instance)
    for request in requests:
        requeue(ctx, request, RefusalReason.ENGINE_FAILED, said.message or "its instance is gone")
    if loading and said.error:
        _note_failure(ctx, instance, said.message, "see `mesh logs`")
    elif not said.error and instance.deployment in ctx.cell.deployments:
        ctx.cell.deployments[instance.deployment].forgive_loads()
    room_changed(ctx)


def _note_failure(ctx: EventContext, instance: InstanceEntry, message: str, hint: str) -> None:
    if instance.ahead:
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
