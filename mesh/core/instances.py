"""The life of instances as the controller decides it: start, ready, idle, unload, gone."""

from mesh.compute.correction import Correction
from mesh.core.cell import DeploymentEntry, InstanceEntry, NodeEntry, RequestEntry
from mesh.core.memory import blocks_for_load, issue, let_go, reclaim
from mesh.core.memory import start as start_operations
from mesh.core.schedule import decodes_share, first_due_s, verdict_on_start
from mesh.core.turn import Turn
from mesh.domain.actions import SendCommand, SetTimer
from mesh.domain.deployment import Deployment
from mesh.domain.events import KeepAliveExpired, LoadExpired, RetryLoadDue
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import INSTANCE, InstanceState, NodeState, advance
from mesh.domain.messages import InstanceReport, LoadInstance, UnloadInstance, UseProfile
from mesh.domain.model import Footprint
from mesh.domain.profile import Profile
from mesh.memory.station import MemoryOperationKind
from mesh.request.placement import NoRoom, NoTime, Start, StartNode, place_instance
from mesh.request.shadow import Verdict


def start_instance(
    turn: Turn,
    entry: DeploymentEntry,
    *,
    only: NodeEntry | None = None,
    wanted_by: RequestEntry | None = None,
) -> NoRoom | NoTime | None:
    """Start loading an instance, in the place of idle ones where there is no room else; on the node
    `only`, and where the request `wanted_by` can be computed in time, if they are given.

    Returns None when it is under way, else what was missing. A node holds at most one instance of a
    deployment: a second would compute on the same device and only take memory.
    """
    deployment = entry.deployment
    assert deployment is not None
    placed = _find_room(turn, entry, deployment, only, wanted_by)
    if not isinstance(placed, Start):
        return placed
    node = turn.cell.nodes[placed.node.node_id]
    reclaim(turn, node, placed.reclaim)
    _load(
        turn, entry, deployment, node, placed, first_due_s(wanted_by) if wanted_by else turn.now_s
    )
    return None


def _find_room(
    turn: Turn,
    entry: DeploymentEntry,
    deployment: Deployment,
    only: NodeEntry | None,
    wanted_by: RequestEntry | None,
) -> Start | NoRoom | NoTime:
    """Nodes where its last load failed come into question only when no other has room."""
    taken = [i.node for i in entry.instances.values()]
    nodes = [n for n in turn.cell.nodes.values() if n.takes(entry.spec.devices) and n not in taken]
    if only is not None:
        nodes = [n for n in nodes if n is only]
    fresh = [n for n in nodes if n.node_id not in entry.avoided]

    def has_time(node: StartNode) -> bool:
        if wanted_by is None or not turn.policy.validates:
            return True
        if not turn.validations_left:
            return False
        turn.validations_left -= 1
        return _has_time(turn, entry, deployment, turn.cell.nodes[node.node_id], wanted_by)

    sizes: dict[Footprint, tuple[int, int]] = {}

    def kv_blocks(footprint: Footprint) -> tuple[int, int]:
        if footprint not in sizes:
            sizes[footprint] = blocks_for_load(
                turn, entry, footprint, deployment.context_tokens_max
            )
        return sizes[footprint]

    def place(among: list[NodeEntry]) -> Start | NoRoom | NoTime:
        return place_instance(
            deployment,
            among,
            kv_blocks=kv_blocks,
            policy=turn.policy,
            has_time=has_time,
        )

    placed = place(fresh)
    if isinstance(placed, NoRoom | NoTime) and len(fresh) < len(nodes):
        return place(nodes)
    return placed


def _has_time(
    turn: Turn, entry: DeploymentEntry, deployment: Deployment, node: NodeEntry, held: RequestEntry
) -> bool:
    """Whether every SLO would be kept with a new instance on the node, its load included."""
    eased, tokens = entry.exceeded.get(node.node_id, (-1, 0))
    if eased == node.eased and held.tokens >= tokens:
        held.turn_down(Verdict.TPOT_EXCEEDED)
        return False
    if node.node_id not in turn.decodes_shares:
        turn.decodes_shares[node.node_id] = decodes_share(node, turn.now_s)
    verdict = verdict_on_start(
        node,
        turn.cell.expectations.profile(deployment.model, node.footprint_of(deployment), node.hello),
        _load_s(turn, deployment, node),
        held,
        share=turn.decodes_shares[node.node_id],
        next_due_s=first_due_s(held),
        now_s=turn.now_s,
        limits=turn.limits,
    )
    if verdict is Verdict.TPOT_EXCEEDED:
        entry.exceeded[node.node_id] = (node.eased, held.tokens)
    if verdict is not Verdict.PASSES:
        held.turn_down(verdict)
    return verdict is Verdict.PASSES


def _load_s(turn: Turn, deployment: Deployment, node: NodeEntry) -> float:
    weights_bytes = node.footprint_of(deployment).weights_bytes
    fingerprint = node.hello.fingerprint
    return turn.cell.expectations.load_s(deployment.model.model_id, fingerprint, weights_bytes)


def _load(
    turn: Turn,
    entry: DeploymentEntry,
    deployment: Deployment,
    node: NodeEntry,
    start: Start,
    needed_s: float,
) -> None:
    turn.cell.instances_started += 1
    profile = turn.cell.expectations.profile(deployment.model, start.footprint, node.hello)
    instance_id = InstanceId(f"{entry.spec.name}-{turn.epoch}-{turn.cell.instances_started}")
    instance = InstanceEntry(
        instance_id=instance_id,
        deployment=entry.spec.name,
        model_id=deployment.model.model_id,
        node=node,
        state=InstanceState.LOADING,
        footprint=start.footprint,
        profile=profile,
        kv_blocks=start.kv_blocks,
        context_tokens_max=deployment.context_tokens_max,
        batch_max=turn.limits.batch_max,
        load_s=_load_s(turn, deployment, node),
        load_started_s=turn.now_s,
        phase="load",
    )
    instance.to_load = LoadInstance(
        instance_id=instance_id,
        deployment=entry.spec.name,
        model=deployment.model,
        kv_blocks=start.kv_blocks,
        context_tokens_max=deployment.context_tokens_max,
        batch_max=turn.limits.batch_max,
        profile=profile,
    )
    _enter(turn, instance)
    size_bytes = start.footprint.instance_bytes(start.kv_blocks)
    issue(turn, instance, MemoryOperationKind.LOAD, size_bytes, needed_s)
    turn.act(
        SetTimer(
            at_s=turn.now_s + turn.limits.load_s_max,
            timer=LoadExpired(instance_id=instance_id),
        )
    )


def _enter(turn: Turn, instance: InstanceEntry) -> None:
    turn.cell.instances[instance.instance_id] = instance
    instance.node.instances[instance.instance_id] = instance
    owner = turn.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.instances[instance.instance_id] = instance
        owner.candidates.rank(instance)


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
    if report.instance_id in turn.cell.instances:
        twice = UnloadInstance(instance_id=report.instance_id)
        turn.act(SendCommand(link_id=node.link_id, command=twice))
        return
    instance = InstanceEntry(
        instance_id=report.instance_id,
        deployment=report.deployment,
        model_id=report.model_id,
        node=node,
        state=InstanceState.READY,
        footprint=report.footprint,
        profile=_profile(turn, node, report) if wanted else None,
        correction=Correction(report.correction, turn.now_s),
        kv_blocks=report.kv_blocks,
        context_tokens_max=report.context_tokens_max,
        batch_max=report.batch_max,
        load_started_s=turn.now_s,
        loaded_at_s=turn.now_s,
    )
    _enter(turn, instance)
    size_bytes = report.footprint.instance_bytes(report.kv_blocks)
    start_operations(turn, node, node.station.record(instance.instance_id, size_bytes))
    if instance.profile is None:
        let_go(turn, instance)
        return
    command = UseProfile(instance_id=instance.instance_id, profile=instance.profile)
    turn.act(SendCommand(link_id=node.link_id, command=command))
    note_idle(turn, instance)


def _profile(turn: Turn, node: NodeEntry, report: InstanceReport) -> Profile:
    deployment = turn.cell.deployments[report.deployment].deployment
    assert deployment is not None
    return turn.cell.expectations.profile(deployment.model, report.footprint, node.hello)


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
    """Let an instance go. A load that its node has begun is given up: nobody knows when the node
    lets go of its memory, so it stays promised until then. One that waits for memory never begins.
    """
    match instance.state:
        case InstanceState.UNLOADING:
            pass
        case InstanceState.LOADING if instance.node.station.running(instance.instance_id):
            instance.state = advance(INSTANCE, instance.state, InstanceState.UNLOADING)
            command = UnloadInstance(instance_id=instance.instance_id)
            turn.act(SendCommand(link_id=instance.node.link_id, command=command))
        case InstanceState.LOADING:
            forget(turn, instance)
            turn.room_appeared = True
        case _:
            let_go(turn, instance)


def drain(turn: Turn, instance: InstanceEntry) -> None:
    """No new requests; it goes when its last one ends."""
    if instance.state is InstanceState.LOADING:
        unload(turn, instance)
    elif instance.state is InstanceState.READY and instance.requests:
        instance.state = advance(INSTANCE, instance.state, InstanceState.DRAINING)
    elif instance.is_loaded:
        unload(turn, instance)


def forget(turn: Turn, instance: InstanceEntry) -> None:
    """The instance is gone: give its memory back and take it out of every book."""
    instance.state = advance(INSTANCE, instance.state, InstanceState.GONE)
    started = instance.node.station.forget(instance.instance_id)
    instance.node.instances.pop(instance.instance_id, None)
    start_operations(turn, instance.node, started)
    turn.cell.instances.pop(instance.instance_id, None)
    owner = turn.cell.deployments.get(instance.deployment)
    if owner is not None:
        owner.instances.pop(instance.instance_id, None)
        owner.candidates.discard(instance)


def note_load_failure(turn: Turn, entry: DeploymentEntry, node: NodeEntry, message: str) -> None:
    """Remember a failed load, and pause before the next: longer after each, up to a bound."""
    entry.load_failures += 1
    entry.load_error = message
    entry.avoided[node.node_id] = message
    doublings = min(entry.load_failures - 1, turn.limits.load_retry_doublings_max)
    entry.paused_until_s = turn.now_s + turn.limits.load_retry_s * 2**doublings
    turn.act(SetTimer(at_s=entry.paused_until_s, timer=RetryLoadDue(name=entry.spec.name)))
