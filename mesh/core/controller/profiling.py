"""How a profile is measured in the cell.

`mesh profile` has a deployment's model measured on a node: an instance is loaded there unless one
is, kept until the node has measured it, and the profile is stored. It then holds for that model on
every node of the same fingerprint, running instances included.
"""

from mesh.core.controller.instances.kv_cache import blocks_for_load, resize
from mesh.core.controller.operations import begin, fail_operation, release_instance, reply_error
from mesh.core.controller.requests.replicas import start_instance
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.operation import OperationEntry
from mesh.domain.actions import ReplyProgress, StoreProfile
from mesh.domain.events import ProfileRequested
from mesh.domain.ids import NodeId
from mesh.domain.messages import (
    LoadProgress,
    ProfileDone,
    ProfileInstance,
    ProfileRefined,
    UseProfile,
)
from mesh.domain.profile import Profile
from mesh.domain.reasons import DeviceKind, OperationKind, ProfileSource


def request_profile(ctx: EventContext, asked: ProfileRequested) -> None:
    """Have a model measured."""
    entry = ctx.cell.current(asked.name)
    if entry is None or entry.deployment is None:
        message = f"there is no deployment {asked.name!r}"
        reply_error(ctx, asked.operation_id, "NotFound", message)
        return
    node = _node(ctx, entry, asked.node_id)
    if isinstance(node, str):
        error = "NotFound" if asked.node_id not in (None, *ctx.cell.nodes) else "Unavailable"
        hint = f"nodes: {', '.join(sorted(ctx.cell.nodes)) or 'none'}"
        reply_error(ctx, asked.operation_id, error, node, hint)
        return
    most = node.hello.cores if node.device is DeviceKind.CPU else 0
    if asked.cores and not 1 <= min(asked.cores) <= max(asked.cores) <= most:
        wanted = ", ".join(map(str, asked.cores))
        message = f"{node.node_id} is to count with {wanted} cores, of which it has {most}"
        hint = f"give numbers from 1 to {most}" if most else "choose a CPU node with --node"
        reply_error(ctx, asked.operation_id, "InvalidInput", message, hint)
        return
    operation = OperationEntry(
        operation_id=asked.operation_id,
        kind=OperationKind.PROFILE,
        name=entry.name,
        node=node,
        operators=asked.operators,
        cores=asked.cores,
    )
    if begin(ctx, operation):
        ctx.wake_all()


def _node(ctx: EventContext, entry: DeploymentEntry, wanted: NodeId | None) -> NodeEntry | str:
    """The node to measure on, or why there is none."""
    if wanted is not None:
        node = ctx.cell.nodes.get(wanted)
        if node is None:
            return f"there is no node {wanted!r}"
        if ctx.takes(node, entry.spec):
            return node
        spec, span = entry.spec, node.hello.tensor_parallel_max
        if node.device in spec.devices and span < spec.tensor_parallel:
            wide = f"instances of {spec.name!r} are to span {spec.tensor_parallel} devices"
            return f"{wide} (tensor_parallel); those of {wanted} can span {span}"
        return f"{wanted} is a {node.device} node, {node.state}: it takes no {spec.name}"
    loaded = [instance for instance in entry.candidates if instance.takes_requests]
    if loaded:
        idlest = min(loaded, key=lambda i: (not i.node.is_idle(), i.batch, i.instance_id))
        return idlest.node
    nodes = [n for n in ctx.cell.nodes.values() if ctx.takes(n, entry.spec)]
    if not nodes:
        return ctx.why_no_node(entry.spec)[0]
    return min(
        nodes,
        key=lambda n: (_lacks_room(ctx, entry, n), ctx.policy.node_rank(n), n.node_id),
    )


def _lacks_room(ctx: EventContext, entry: DeploymentEntry, node: NodeEntry) -> tuple[bool, bool]:
    """Whether it has no room for an instance, and whether idle ones could not make it either."""
    deployment = entry.made
    footprint = node.footprint_of(deployment)
    least, _ = blocks_for_load(ctx, entry, (), footprint)
    needed_bytes = footprint.instance_bytes(least)
    lacks = needed_bytes > node.free_bytes_for(deployment)
    return lacks, needed_bytes > node.obtainable_bytes(deployment)


def advance_profiles(ctx: EventContext) -> None:
    """Send off those whose instance is up; load the instance of those that have none."""
    for operation in list(ctx.cell.operations.values()):
        if operation.kind is OperationKind.PROFILE and not operation.measuring:
            _advance(ctx, operation)


def _advance(ctx: EventContext, operation: OperationEntry) -> None:
    entry, node = ctx.cell.deployments.get(operation.name), operation.node
    if entry is None or entry.deployment is None or node is None:
        message = f"{operation.name!r} was deleted meanwhile"
        fail_operation(ctx, operation, "NotFound", message)
        return
    here = [i for i in entry.instances.values() if i.node is node]
    for instance in here:
        if instance.is_loaded and not node.station.is_pending(instance.instance_id):
            _measure(ctx, operation, instance)
    if here:
        return
    operation.release()
    if node.node_id in entry.avoided:
        message = f"its last load on {node.node_id} failed: {entry.avoided[node.node_id]}"
        fail_operation(ctx, operation, "Unavailable", message)
        return
    if entry.replicas() >= entry.spec.scaling.replicas_max:
        message = f"all {entry.replicas()} instances that {operation.name!r} may have are elsewhere"
        hint = "measure it on a node that has one, or raise its maximum with `mesh scale`"
        fail_operation(ctx, operation, "Unavailable", message, hint)
        return
    if not start_instance(ctx, entry, among=(node,)):
        hint, message = "start a larger node", ctx.why_too_large(entry)
        if not message:
            message = f"{node.node_id} has no room for an instance of {operation.name!r}"
            hint = "try again when its instances are idle, or choose another node with --node"
        fail_operation(ctx, operation, "Unavailable", message, hint)


def _measure(ctx: EventContext, operation: OperationEntry, instance: InstanceEntry) -> None:
    """Have it measured, with a KV cache as large as a survey can use and memory allows: resized
    first, if need be, and kept from then on.
    """
    node = instance.node
    if operation.instance is not instance:
        operation.keep(instance)
        instance.unpark()
        target = _measured_blocks(ctx, instance)
        if target > instance.promised_blocks:
            resize(ctx, instance, target, ctx.now_s)
            return
    operation.note_measuring()
    command = ProfileInstance(
        operation_id=operation.operation_id,
        instance_id=instance.instance_id,
        operators=operation.operators,
        cores=operation.cores,
    )
    ctx.send(node, command)


def _measured_blocks(ctx: EventContext, instance: InstanceEntry) -> int:
    footprint = instance.footprint
    useful = instance.batch_max * footprint.blocks_for(instance.context_tokens_max)
    wanted = min(footprint.blocks_for(ctx.limits.kv_tokens_profiled), useful)
    free_bytes = max(instance.node.free_bytes, 0)
    return min(wanted, instance.promised_blocks + free_bytes // footprint.kv_block_bytes)


def tell_of_load(ctx: EventContext, instance: InstanceEntry, report: LoadProgress) -> None:
    """Those who want a profile of what loads there wait for it, too."""
    for operation in ctx.cell.operations.values():
        wants = operation.kind is OperationKind.PROFILE and operation.name == instance.deployment
        if wants and operation.node is instance.node:
            operation_id = operation.operation_id
            ctx.act(
                ReplyProgress(operation_id=operation_id, phase=report.phase, share=report.share)
            )


def profile_done(ctx: EventContext, report: ProfileDone) -> None:
    """A profile was measured: use it wherever it holds, as its node does already, and keep it. The
    call is answered when it is kept; were that to fail, it would hold until the controller ends.
    """
    operation = ctx.cell.operations.get(report.operation_id)
    if operation is None or operation.instance is None or not operation.measuring:
        return
    instance, profile = operation.instance, report.profile
    asked = (instance.model_id, instance.node.hello.fingerprint)
    if (profile.model_id, profile.fingerprint) != asked:
        message = f"the node measured {profile.model_id} on {profile.fingerprint} instead"
        fail_operation(ctx, operation, "Unavailable", message)
        return
    operation.store(profile)
    release_instance(ctx, operation)
    _spread(ctx, profile)
    ctx.act(StoreProfile(operation_id=operation.operation_id, profile=profile))


def _spread(ctx: EventContext, profile: Profile, told_by: InstanceEntry | None = None) -> None:
    """Predict by a new profile wherever it holds, but where `told_by` does so already: all
    instances of its model on such nodes, and those of other models of its shape of which less is
    known.
    """
    ctx.cell.learn_profile(profile)
    for instance in ctx.cell.instances.values():
        known = instance.profile
        if known is None or instance.node.hello.fingerprint != profile.fingerprint:
            continue
        alike = bool(profile.shape) and known.shape == profile.shape
        if instance.model_id != profile.model_id and not alike:
            continue
        asked_for = told_by is None and instance.model_id == profile.model_id
        better = asked_for or known.origin.rank < profile.origin.rank
        if not better:
            continue
        taken = profile.taken_for(instance.model_id)
        instance.use_profile(taken)
        if instance is not told_by:
            command = UseProfile(instance_id=instance.instance_id, profile=taken)
            ctx.send(instance.node, command)


def profile_refined(ctx: EventContext, report: ProfileRefined) -> None:
    """An instance's iterations have told where its measured profile was off. That holds for what is
    loaded from now on, too, beside what others of its kind have told; those that run learn by
    themselves. One of an earlier survey than the instance is predicted by comes too late. A better
    known one, that has come of iterations or of its node's rests, takes the place of the profile.
    """
    instance, profile = ctx.cell.instances.get(report.instance_id), report.profile
    known = None if instance is None else instance.profile
    if instance is not None and known is not None and _survey(profile) == _survey(known):
        instance.refine_profile(report, ctx.now_s)
        kept = ctx.cell.refine_profile(known, profile)
        ctx.act(StoreProfile(operation_id=None, profile=kept))
    elif instance is not None and known is not None and _is_news(instance, known, profile):
        _spread(ctx, profile, told_by=instance)
        ctx.act(StoreProfile(operation_id=None, profile=profile))


def _is_news(instance: InstanceEntry, known: Profile, told: Profile) -> bool:
    """Whether a profile that nobody asked for says more than what the instance is predicted by."""
    by_itself = ProfileSource.ESTIMATE.rank < told.origin.rank < ProfileSource.SURVEY.rank
    mine = (told.model_id, told.fingerprint) == (
        instance.model_id,
        instance.node.hello.fingerprint,
    )
    return by_itself and mine and known.origin.rank < told.origin.rank


def _survey(profile: Profile) -> tuple[object, ...]:
    return profile.model_id, profile.fingerprint, profile.origin, profile.measured_s
