"""Turns the cell's live state into snapshots for people and APIs."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from statistics import median

from mesh.compute.times import Times
from mesh.core.controller.state.cell import Cell
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.rollout import RolloutEntry
from mesh.domain.deployment import Deployment
from mesh.domain.energy import together
from mesh.domain.ids import DeploymentName, InstanceId, NodeId
from mesh.domain.lifecycle import InstanceState, NodeState
from mesh.domain.profile import Profile
from mesh.domain.revision import RevisionState, number_of, public, public_name
from mesh.domain.values import replace
from mesh.domain.views import (
    CellSnapshot,
    ClassView,
    Deployed,
    DeploymentSnapshot,
    InstanceSnapshot,
    MemoryOperationView,
    NodeSnapshot,
    NodesWanted,
    ProfileView,
    RevisionView,
)
from mesh.memory.shared_weights import counted_once
from mesh.memory.station import Reservation, ReservationStation

Looking = Generator[None, float, CellSnapshot]


def cell_snapshot(cell: Cell, now_s: float) -> CellSnapshot:
    """Everything, ordered by name."""
    looking = look(cell)
    next(looking)
    try:
        while True:
            looking.send(now_s)
    except StopIteration as end:
        snapshot: CellSnapshot = end.value
        return snapshot


def look(cell: Cell) -> Looking:
    """The same, a node or a deployment at a time, each as of the time that is sent for it. The cell
    may change in between: of a large one all at once would keep its decisions waiting.
    """
    deployments, nodes = [], []
    seen: dict[InstanceId, InstanceSnapshot] = {}
    now_s = yield
    for node_id in sorted(cell.nodes):
        node = cell.nodes.get(node_id)
        if node is not None:
            nodes.append(_node(cell, node, now_s))
            seen |= {instance.instance_id: instance for instance in nodes[-1].instances}
            now_s = yield
    for name in sorted({public_name(n) for n in cell.deployments}):
        entry = cell.current(name)
        if entry is not None:
            deployments.append(_deployment(cell, entry, seen, now_s))
            now_s = yield
    return CellSnapshot(
        deployments=tuple(deployments),
        nodes=tuple(nodes),
        queued=cell.queued(),
        running=cell.running(),
        served=cell.served,
        refused=tuple(sorted(cell.refused.items())),
        prefetches=cell.prefetches.view,
        wanted=nodes_wanted(cell, now_s),
        energy=replace(cell.energy, reason=together(n.energy for n in cell.nodes.values()).reason),
    )


def deployed(cell: Cell, name: DeploymentName | None = None) -> tuple[Deployed, ...]:
    """All deployments, ordered by name, or the one of this name, where it is there."""
    names = sorted({public_name(n) for n in cell.deployments}) if name is None else [name]
    found = map(cell.current, names)
    return tuple(
        Deployed(
            spec=public(entry.spec),
            model=entry.deployment.model if entry.deployment else None,
            state=entry.state,
        )
        for entry in found
        if entry is not None
    )


def nodes_wanted(cell: Cell, now_s: float) -> tuple[NodesWanted, ...]:
    """The kinds of which somebody starts and stops nodes, once it is known."""
    return tuple(
        NodesWanted(
            device=kind.range.device,
            wanted=kind.wanted,
            ready=sum(
                node.device is kind.range.device and node.state is NodeState.READY
                for node in cell.nodes.values()
            ),
            least=kind.range.least,
            most=kind.range.most,
            lacking_s=0.0 if kind.lacking_since_s is None else now_s - kind.lacking_since_s,
            why=kind.why,
        )
        for kind in cell.wanted.values()
        if kind.wanted is not None
    )


def _deployment(
    cell: Cell, entry: DeploymentEntry, seen: Mapping[InstanceId, InstanceSnapshot], now_s: float
) -> DeploymentSnapshot:
    """All revisions of it together: its callers know one. `seen`: instances as their nodes show
    them.
    """
    deployment = entry.deployment
    rollout = cell.rollouts.get(public_name(entry.name))
    coming = [rollout.coming] if rollout is not None and rollout.coming is not None else []
    answering = [entry, *(rollout.retiring.values() if rollout is not None else ())]
    instances = {i.instance_id: i for e in (*answering, *coming) for i in e.instances.values()}
    return DeploymentSnapshot(
        spec=public(entry.spec),
        model=deployment.model if deployment else None,
        state=entry.state,
        context_tokens_max=deployment.context_tokens_max if deployment else 0,
        queued=sum(len(e.queue) for e in answering),
        running=sum(i.batch for i in instances.values()),
        served=sum(e.served for e in answering),
        refused=sum(e.refused for e in answering),
        instances=tuple(seen.get(i) or _instance(instances[i], now_s) for i in sorted(instances)),
        footprints=tuple(sorted(deployment.footprints)) if deployment else (),
        phase="" if deployment else entry.phase,
        share=0.0 if deployment else entry.share,
        revision=deployment.revision if deployment else 1,
        revisions=_revisions(rollout, entry) if rollout is not None else (),
        prompt_tokens=sum(e.prompt_tokens for e in answering),
        cached_tokens=sum(e.cached_tokens for e in answering),
        energy=together(e.energy for e in answering),
        classes=_classes(entry, answering) if entry.spec.classes else (),
        planned=None if entry.spec.scaling.plan is None else entry.planned,
    )


def _classes(
    serves: DeploymentEntry, answering: Sequence[DeploymentEntry]
) -> tuple[ClassView, ...]:
    """By the classes of the revision that serves; those before it may answer some still."""
    queued = Counter(r.slo.name for e in answering for r in e.queue)
    instances = [i for e in answering for i in e.instances.values()]
    running = Counter(r.slo.name for i in instances for r in i.requests.values() if not r.is_copy)
    counted = [e.by_class for e in answering]
    return tuple(
        ClassView(
            name=slo.name,
            queued=queued[slo.name],
            running=running[slo.name],
            served=sum(of[slo.name].served for of in counted if slo.name in of),
            met=sum(of[slo.name].met for of in counted if slo.name in of),
            refused=sum(of[slo.name].refused for of in counted if slo.name in of),
        )
        for slo in serves.spec.classes
    )


def _revisions(rollout: RolloutEntry, serves: DeploymentEntry) -> tuple[RevisionView, ...]:
    """Those that are kept, with the one that serves and what there is of each now."""
    retiring = {
        e.deployment.revision: e for e in rollout.retiring.values() if e.deployment is not None
    }
    views = [_revision(serves.made, RevisionState.SERVING, serves)]
    for kept in rollout.revisions:
        entry = retiring.get(kept.number)
        state = RevisionState.RETIRING if entry is not None else kept.state
        if kept.state is RevisionState.STARTING:
            entry = rollout.coming
        views.append(_revision(kept.deployment, state, entry, kept.message))
    if rollout.coming is not None and rollout.target is None:
        coming = rollout.coming
        views.append(
            RevisionView(
                number=number_of(coming.name),
                state=RevisionState.IMPORTING,
                spec=public(coming.spec),
                message=f"{coming.phase} {coming.share:.0%}" if coming.phase else "",
            )
        )
    return tuple(sorted(views, key=lambda view: view.number))


def _revision(
    deployment: Deployment, state: RevisionState, entry: DeploymentEntry | None, message: str = ""
) -> RevisionView:
    instances = list(entry.instances.values()) if entry is not None else []
    starts = entry is not None and state is RevisionState.STARTING
    return RevisionView(
        number=deployment.revision,
        state=state,
        spec=public(deployment.spec),
        message=entry.load_error if entry is not None and starts else message,
        ready=sum(instance.is_loaded for instance in instances),
        wanted=entry.spec.scaling.replicas_min if entry is not None else 0,
        requests=sum(i.batch for i in instances) + (len(entry.queue) if entry is not None else 0),
    )


def _node(cell: Cell, node: NodeEntry, now_s: float) -> NodeSnapshot:
    return NodeSnapshot(
        node_id=node.node_id,
        state=node.state,
        device=node.device,
        hardware=node.hello.hardware,
        cores=node.hello.cores,
        engine=node.hello.engine,
        memory_bytes=node.hello.memory_bytes,
        base_bytes=node.base_bytes,
        promised_bytes=node.station.promised_bytes,
        tracked_bytes=node.station.tracked_bytes,
        rss_bytes=node.rss_bytes,
        unaccounted_bytes=_unaccounted_bytes(node),
        operations=_reservations(node.station, now_s),
        silent_s=now_s - node.last_seen_s,
        instances=tuple(_instance(node.instances[i], now_s) for i in sorted(node.instances)),
        fingerprint=node.hello.fingerprint,
        load_slowdown=node.load_slowdown,
        busy_load_factor=1.0 + cell.expectations.slowdown(node.hello),
        prefetch_bytes=node.hello.prefetch_bytes,
        precision=node.hello.precision,
        asleep=node.asleep(),
        load_times=cell.expectations.load_times(node.hello),
        footprints=tuple(sorted(node.footprints.items())),
        energy=node.energy,
    )


def _unaccounted_bytes(node: NodeEntry) -> int:
    """0 until a heartbeat has told. An engine without instances holds nothing: what stays is of
    interest then most of all.
    """
    if not node.rss_bytes:
        return 0
    return node.rss_bytes - node.base_bytes - node.engine_bytes


def _reservations(station: ReservationStation, now_s: float) -> tuple[MemoryOperationView, ...]:
    def view(reservation: Reservation, running: bool) -> MemoryOperationView:
        return MemoryOperationView(
            kind=reservation.kind,
            instance_id=reservation.instance_id,
            size_bytes=reservation.size_bytes,
            running=running,
            needed_in_s=reservation.deadline_s - now_s,
        )

    running = [view(reservation, True) for reservation in station.running_reservations()]
    return (*running, *(view(reservation, False) for reservation in station.waiting()))


def _weights_bytes(instance: InstanceEntry) -> int:
    """The instance's weights, and what stays beside them. Weights that several instances of its
    node share are counted with the first of them.
    """
    footprint = instance.footprint
    if instance.shared_weights is None:
        return footprint.weights_bytes + footprint.stays_bytes
    here = instance.node.instances
    upto = [here[name] for name in sorted(here) if name <= instance.instance_id]
    counted = counted_once([(i.footprint.weights_bytes, i.shared_weights) for i in upto])
    return counted[-1] + footprint.stays_bytes


def _instance(instance: InstanceEntry, now_s: float) -> InstanceSnapshot:
    loading = instance.state is InstanceState.LOADING
    until_s = now_s if loading else instance.loaded_at_s
    headrooms = sorted(request.due_s - now_s for request in instance.requests.values())
    profile = instance.profile
    return InstanceSnapshot(
        instance_id=instance.instance_id,
        deployment=public_name(instance.deployment),
        node_id=instance.node.node_id,
        state=instance.state,
        batch=instance.batch,
        batch_max=instance.batch_max,
        kv_blocks=instance.kv_blocks,
        kv_blocks_used=instance.kv_blocks_used,
        kv_blocks_cached=instance.kv_blocks_cached,
        weights_bytes=_weights_bytes(instance),
        kv_bytes=instance.kv_blocks * instance.footprint.kv_block_bytes,
        kv_used_bytes=instance.kv_blocks_used * instance.footprint.kv_block_bytes,
        kv_required_bytes=instance.required_blocks * instance.footprint.kv_block_bytes,
        load_s=max(0.0, until_s - instance.load_started_s),
        phase=instance.phase,
        share=instance.share,
        headroom_least_s=headrooms[0] if headrooms else None,
        headroom_p50_s=median(headrooms) if headrooms else None,
        iteration_s=_iteration_s(instance, now_s),
        correction=instance.correction.factor(now_s),
        correction_planned=instance.correction.planned(now_s),
        stalls=instance.stalls,
        profile=_profile_words(profile) if profile else "",
        profile_source=profile.origin if profile else None,
        off_p50=instance.off_p50,
        off_p95=instance.off_p95,
        resident_share=None if loading else instance.resident_share,
        swaps_to=None if instance.swap_began_s is None else instance.swaps_to,
        tier=instance.tier,
        load_expected_s=instance.load_expected_s,
        load_planned_s=instance.load_s,
    )


def _profile_words(profile: Profile) -> str:
    measured_as = f"measured as {profile.measured_as}" if profile.measured_as else "measured"
    return profile.scaled_from or measured_as


def _iteration_s(instance: InstanceEntry, now_s: float) -> float:
    """The predicted time of its next decode; where it has no request, that of one with half a
    context.
    """
    if instance.profile is None:
        return 0.0
    times = Times(instance.profile, instance.correction.factor(now_s))
    batch = max(instance.batch, 1)
    tokens = sum(request.tokens for request in instance.requests.values())
    return times.decode_s(batch, tokens / batch if tokens else instance.context_tokens_max / 2)


def profile_views(cell: Cell, deployment: Deployment) -> tuple[ProfileView, ...]:
    """What holds for each kind of node that may hold the deployment, and what was measured on
    others.
    """
    found: dict[str, Profile] = {}
    nodes: dict[str, list[NodeId]] = {}
    for node_id in sorted(cell.nodes):
        node = cell.nodes[node_id]
        if node.suits(deployment.spec):
            known = found.get(node.hello.fingerprint) or cell.profile_on(node, deployment)
            found[known.fingerprint] = known
            nodes.setdefault(known.fingerprint, []).append(node_id)
    for known in cell.expectations.measured(deployment.model.model_id):
        found.setdefault(known.fingerprint, known)
    return tuple(
        ProfileView(profile=found[fingerprint], nodes=tuple(nodes.get(fingerprint, ())))
        for fingerprint in sorted(found)
    )
