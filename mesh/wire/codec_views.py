"""Pictures of the cell for operators: deployments, nodes, instances, status, events.

Nobody decides by them: a word that only the controller's version knows is `shown`, and costs
nothing of what stands beside it.
"""

import math
from collections.abc import Iterable, Mapping

from mesh.domain.errors import InvalidInput
from mesh.domain.ids import DeploymentName, InstanceId, ModelId, NodeId, RequestId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.model import Footprint
from mesh.domain.reasons import DeviceKind, RefusalReason
from mesh.domain.revision import RevisionState
from mesh.domain.steps import LoadTier
from mesh.domain.usage import Usage
from mesh.domain.views import (
    CellEvent,
    CellLine,
    CellStatus,
    DeploymentSnapshot,
    InstanceSnapshot,
    LoadTimesView,
    MemoryOperationView,
    NodeSnapshot,
    PrefetchView,
    ProfileView,
    RequestPhase,
    RequestSnapshot,
    RevisionView,
)
from mesh.v1 import control_pb2 as pb
from mesh.v1 import model_pb2
from mesh.wire.codec_model import (
    footprint_from_wire,
    footprint_to_wire,
    model_from_wire,
    model_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from mesh.wire.codec_profile import (
    factor_from_wire,
    profile_from_wire,
    profile_to_wire,
    stalls_from_wire,
    stalls_to_wire,
)
from mesh.wire.malformed import require, shown


def instance_to_wire(instance: InstanceSnapshot) -> pb.Instance:
    return pb.Instance(
        instance_id=instance.instance_id,
        deployment=instance.deployment,
        node_id=instance.node_id,
        state=instance.state,
        batch=instance.batch,
        batch_max=instance.batch_max,
        kv_blocks=instance.kv_blocks,
        kv_blocks_used=instance.kv_blocks_used,
        kv_blocks_cached=instance.kv_blocks_cached,
        weights_bytes=instance.weights_bytes,
        kv_bytes=instance.kv_bytes,
        kv_used_bytes=instance.kv_used_bytes,
        kv_required_bytes=instance.kv_required_bytes,
        load_s=instance.load_s,
        phase=instance.phase,
        share=instance.share,
        headroom_least_s=instance.headroom_least_s,
        headroom_p50_s=instance.headroom_p50_s,
        iteration_s=instance.iteration_s,
        correction=instance.correction,
        correction_planned=instance.correction_planned,
        stalls=stalls_to_wire(instance.stalls),
        profile=instance.profile,
        tier=instance.tier or "",
        load_expected_s=instance.load_expected_s,
        load_planned_s=instance.load_planned_s,
    )


def instance_from_wire(message: pb.Instance) -> InstanceSnapshot:
    least, p50 = message.HasField("headroom_least_s"), message.HasField("headroom_p50_s")
    return InstanceSnapshot(
        instance_id=InstanceId(message.instance_id),
        deployment=DeploymentName(message.deployment),
        node_id=NodeId(message.node_id),
        state=shown(InstanceState, message.state, message, "state"),
        batch=message.batch,
        batch_max=message.batch_max,
        kv_blocks=message.kv_blocks,
        kv_blocks_used=message.kv_blocks_used,
        kv_blocks_cached=message.kv_blocks_cached,
        weights_bytes=message.weights_bytes,
        kv_bytes=message.kv_bytes,
        kv_used_bytes=message.kv_used_bytes,
        kv_required_bytes=message.kv_required_bytes,
        load_s=message.load_s,
        phase=message.phase,
        share=message.share,
        headroom_least_s=message.headroom_least_s if least else None,
        headroom_p50_s=message.headroom_p50_s if p50 else None,
        iteration_s=message.iteration_s,
        correction=factor_from_wire(message.correction, message, "correction"),
        correction_planned=factor_from_wire(
            message.correction_planned, message, "correction_planned"
        ),
        stalls=stalls_from_wire(message.stalls),
        profile=message.profile,
        tier=shown(LoadTier, message.tier, message, "tier") if message.tier else None,
        load_expected_s=message.load_expected_s,
        load_planned_s=message.load_planned_s,
    )


def operation_to_wire(operation: MemoryOperationView) -> pb.MemoryOperation:
    return pb.MemoryOperation(
        kind=operation.kind,
        instance_id=operation.instance_id,
        size_bytes=operation.size_bytes,
        running=operation.running,
        needed_in_s=operation.needed_in_s,
    )


def operation_from_wire(message: pb.MemoryOperation) -> MemoryOperationView:
    if math.isnan(message.needed_in_s):
        raise InvalidInput("MemoryOperation.needed_in_s is nan; it must be a number of seconds")
    return MemoryOperationView(
        kind=message.kind,
        instance_id=InstanceId(message.instance_id),
        size_bytes=message.size_bytes,
        running=message.running,
        needed_in_s=message.needed_in_s,
    )


def deployment_to_wire(deployment: DeploymentSnapshot) -> pb.Deployment:
    return pb.Deployment(
        spec=spec_to_wire(deployment.spec),
        model=model_to_wire(deployment.model) if deployment.model is not None else None,
        state=deployment.state,
        context_tokens_max=deployment.context_tokens_max,
        queued=deployment.queued,
        running=deployment.running,
        instances=map(instance_to_wire, deployment.instances),
        served=deployment.served,
        refused=deployment.refused,
        footprints=_footprints_to_wire(deployment.footprints),
        phase=deployment.phase,
        share=deployment.share,
        revision=deployment.revision,
        revisions=map(_revision_to_wire, deployment.revisions),
        prompt_tokens=deployment.prompt_tokens,
        cached_tokens=deployment.cached_tokens,
    )


def deployment_from_wire(message: pb.Deployment) -> DeploymentSnapshot:
    require(message, "spec")
    return DeploymentSnapshot(
        spec=spec_from_wire(message.spec, shown),
        model=model_from_wire(message.model, shown) if message.HasField("model") else None,
        state=shown(DeploymentState, message.state, message, "state"),
        context_tokens_max=message.context_tokens_max,
        queued=message.queued,
        running=message.running,
        instances=tuple(instance_from_wire(i) for i in message.instances),
        served=message.served,
        refused=message.refused,
        footprints=_footprints_from_wire(message.footprints),
        phase=message.phase,
        share=message.share,
        revision=message.revision,
        revisions=tuple(map(_revision_from_wire, message.revisions)),
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
    )


def _revision_to_wire(view: RevisionView) -> pb.Revision:
    return pb.Revision(
        number=view.number,
        state=view.state,
        spec=spec_to_wire(view.spec),
        message=view.message,
        instances_ready=view.ready,
        instances_wanted=view.wanted,
        requests=view.requests,
    )


def _revision_from_wire(message: pb.Revision) -> RevisionView:
    require(message, "spec")
    return RevisionView(
        number=message.number,
        state=shown(RevisionState, message.state, message, "state"),
        spec=spec_from_wire(message.spec, shown),
        message=message.message,
        ready=message.instances_ready,
        wanted=message.instances_wanted,
        requests=message.requests,
    )


def _footprints_to_wire(
    footprints: Iterable[tuple[str, Footprint]],
) -> Mapping[str, model_pb2.Footprint]:
    return {key: footprint_to_wire(footprint) for key, footprint in footprints}


def _footprints_from_wire(
    messages: Mapping[str, model_pb2.Footprint],
) -> tuple[tuple[str, Footprint], ...]:
    return tuple((key, footprint_from_wire(found)) for key, found in sorted(messages.items()))


def node_to_wire(node: NodeSnapshot) -> pb.Node:
    return pb.Node(
        node_id=node.node_id,
        state=node.state,
        device=node.device,
        hardware=node.hardware,
        cores=node.cores,
        engine=node.engine,
        memory_bytes=node.memory_bytes,
        base_bytes=node.base_bytes,
        promised_bytes=node.promised_bytes,
        tracked_bytes=node.tracked_bytes,
        rss_bytes=node.rss_bytes,
        unaccounted_bytes=node.unaccounted_bytes,
        operations=map(operation_to_wire, node.operations),
        silent_s=node.silent_s,
        instances=map(instance_to_wire, node.instances),
        fingerprint=node.fingerprint,
        load_slowdown=node.load_slowdown,
        busy_load_factor=node.busy_load_factor,
        prefetch_bytes=node.prefetch_bytes,
        precision=node.precision,
        asleep=node.asleep,
        load_times=map(_load_times_to_wire, node.load_times),
        footprints=_footprints_to_wire(node.footprints),
    )


def node_from_wire(message: pb.Node) -> NodeSnapshot:
    return NodeSnapshot(
        node_id=NodeId(message.node_id),
        state=shown(NodeState, message.state, message, "state"),
        device=shown(DeviceKind, message.device, message, "device"),
        hardware=message.hardware,
        cores=message.cores,
        engine=message.engine,
        memory_bytes=message.memory_bytes,
        base_bytes=message.base_bytes,
        promised_bytes=message.promised_bytes,
        tracked_bytes=message.tracked_bytes,
        rss_bytes=message.rss_bytes,
        unaccounted_bytes=message.unaccounted_bytes,
        operations=tuple(operation_from_wire(o) for o in message.operations),
        silent_s=message.silent_s,
        instances=tuple(instance_from_wire(i) for i in message.instances),
        fingerprint=message.fingerprint,
        load_slowdown=factor_from_wire(message.load_slowdown, message, "load_slowdown"),
        busy_load_factor=factor_from_wire(message.busy_load_factor, message, "busy_load_factor"),
        prefetch_bytes=message.prefetch_bytes,
        precision=message.precision,
        asleep=tuple(map(ModelId, message.asleep)),
        load_times=tuple(map(_load_times_from_wire, message.load_times)),
        footprints=_footprints_from_wire(message.footprints),
    )


def _load_times_to_wire(times: LoadTimesView) -> pb.LoadTimes:
    return pb.LoadTimes(
        tier=times.tier,
        fixed_s=times.fixed_s,
        bytes_per_s=times.bytes_per_s,
        loads=times.loads,
        factor=times.factor,
    )


def _load_times_from_wire(message: pb.LoadTimes) -> LoadTimesView:
    return LoadTimesView(
        tier=shown(LoadTier, message.tier, message, "tier"),
        fixed_s=message.fixed_s,
        bytes_per_s=message.bytes_per_s,
        loads=message.loads,
        factor=message.factor,
    )


def profile_view_to_wire(view: ProfileView) -> pb.KnownProfile:
    return pb.KnownProfile(profile=profile_to_wire(view.profile), nodes=view.nodes)


def profile_view_from_wire(message: pb.KnownProfile) -> ProfileView:
    require(message, "profile")
    return ProfileView(
        profile=profile_from_wire(message.profile, shown),
        nodes=tuple(NodeId(node) for node in message.nodes),
    )


def status_to_wire(status: CellStatus) -> pb.Status:
    return pb.Status(
        version=status.version,
        uptime_s=status.uptime_s,
        nodes_ready=status.nodes_ready,
        nodes=status.nodes,
        deployments=status.deployments,
        instances=status.instances,
        queued=status.queued,
        running=status.running,
        served=status.served,
        refused={reason.value: count for reason, count in status.refused},
        state_path=status.state_path,
        prefetches=pb.Prefetches(
            begun=status.prefetches.begun,
            used=status.prefetches.used,
            wasted=status.prefetches.wasted,
            loads=status.prefetches.loads,
        ),
    )


def status_from_wire(message: pb.Status) -> CellStatus:
    """Refusals come ordered by reason."""
    return CellStatus(
        version=message.version,
        uptime_s=message.uptime_s,
        nodes_ready=message.nodes_ready,
        nodes=message.nodes,
        deployments=message.deployments,
        instances=message.instances,
        queued=message.queued,
        running=message.running,
        served=message.served,
        refused=tuple(
            (shown(RefusalReason, reason, message, "refused"), count)
            for reason, count in sorted(message.refused.items())
        ),
        state_path=message.state_path,
        prefetches=PrefetchView(
            begun=message.prefetches.begun,
            used=message.prefetches.used,
            wasted=message.prefetches.wasted,
            loads=message.prefetches.loads,
        ),
    )


def cell_event_to_wire(event: CellEvent) -> pb.CellEvent:
    line = event.line
    return pb.CellEvent(age_s=event.age_s, kind=line.kind, subject=line.subject, text=line.text)


def cell_event_from_wire(message: pb.CellEvent) -> CellEvent:
    line = CellLine(kind=message.kind, subject=message.subject, text=message.text)
    return CellEvent(age_s=message.age_s, line=line)


def usage_to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(
        hour_unix_s=usage.hour_unix_s,
        deployment=usage.deployment,
        requests=usage.requests,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        refused=usage.refused,
        tenant=usage.tenant,
        key_id=usage.key_id,
    )


def usage_from_wire(message: pb.Usage) -> Usage:
    return Usage(
        hour_unix_s=message.hour_unix_s,
        deployment=DeploymentName(message.deployment),
        requests=message.requests,
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        refused=message.refused,
        tenant=message.tenant,
        key_id=message.key_id,
    )


def open_request_to_wire(request: RequestSnapshot) -> pb.OpenRequest:
    return pb.OpenRequest(
        request_id=request.request_id,
        deployment=request.deployment,
        phase=request.phase,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        output_tokens_max=request.output_tokens_max,
        age_s=request.age_s,
    )


def open_request_from_wire(message: pb.OpenRequest) -> RequestSnapshot:
    return RequestSnapshot(
        request_id=RequestId(message.request_id),
        deployment=DeploymentName(message.deployment),
        phase=shown(RequestPhase, message.phase, message, "phase"),
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        output_tokens_max=message.output_tokens_max,
        age_s=message.age_s,
    )
