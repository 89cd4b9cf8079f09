"""Models that come nearer before they are called: what is fetched ahead, where, and when it yields.

Looked at with every lease check, on nodes that compute nothing and load nothing, for deployments
called of late and loaded nowhere, the most called first. A model that no store has is imported; one
that a short load brings up is loaded for nobody and waits, idle, as a parked instance does: it is
in the books, and goes when anybody wants its memory. Before: `nodes.check_leases`. After: the
lanes of loads and imports, and `lifecycle`, for whose loads all of this gives way.
"""

from collections.abc import Sequence
from heapq import nsmallest
from math import inf, log

from mesh.core.controller.instances.kv_cache import PARKED_BLOCKS, Room
from mesh.core.controller.instances.lifecycle import load, may_start
from mesh.core.controller.instances.loading_lane import plan_load
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.prefetches import ImportAhead
from mesh.domain.actions import SendCommand
from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId, OperationId
from mesh.domain.lifecycle import DeploymentState, InstanceState, NodeState
from mesh.domain.messages import CancelImport, ImportDone, ImportFailed, ImportModel
from mesh.domain.model import Footprint, imported_id
from mesh.domain.steps import LoadTier
from mesh.policy.room import enough, freed_bytes

LOOKS_MAX = 32
"""Deployments that one look tries to bring nearer."""

LIKELIER = log(2.0)
"""An instance gives way only to a model that is called twice as often: the two would else go on
taking each other's place.
"""


def prefetch(ctx: EventContext) -> None:
    """At most one step on each node that has nothing else to do."""
    for node in ctx.cell.nodes.values():
        _check_time(ctx, node)
    if ctx.limits.parked_s_max <= 0.0 or not ctx.policy.prefetches or ctx.cell.queued():
        return
    nodes = [n for n in ctx.cell.nodes.values() if n.hello.prefetch_bytes and _rests(ctx, n)]
    for entry in _likely(ctx) if nodes else ():
        taken = _fetch(ctx, entry, [n for n in nodes if ctx.takes(n, entry.spec)])
        nodes = [node for node in nodes if node is not taken]


def _rests(ctx: EventContext, node: NodeEntry) -> bool:
    """Whether nothing is computed, loaded, imported or moved on it, nor about to be."""
    instances, station = node.instances.values(), node.station
    return (
        node.state is NodeState.READY
        and node.is_idle()
        and node.prefetches.importing is None
        and all(i.is_loaded and not i.expected and not i.profiling for i in instances)
        and not station.running_reservations()
        and not station.waiting()
        and all(operation.node is not node for operation in ctx.cell.operations.values())
    )


def _likely(ctx: EventContext) -> list[DeploymentEntry]:
    """Deployments called of late and loaded nowhere, the most called first. Those that nobody has
    called for as long as an idle instance stays would not be there in any case.
    """
    likely = [
        entry
        for entry in ctx.cell.deployments.values()
        if entry.state is DeploymentState.READY
        and not entry.instances
        and ctx.now_s - entry.called_s <= ctx.limits.parked_s_max
        and may_start(ctx, entry)
    ]
    return nsmallest(LOOKS_MAX, likely, key=lambda entry: (-entry.calls_log, entry.spec.name))


def _fetch(
    ctx: EventContext, entry: DeploymentEntry, nodes: Sequence[NodeEntry]
) -> NodeEntry | None:
    """Bring the deployment's model nearer on one of these nodes; which, None if on none."""
    deployment = entry.deployment
    assert deployment is not None
    nodes = [n for n in nodes if n.prefetches.may_try(deployment.model.model_id)]
    nearest = sorted(nodes, key=lambda n: (-n.tier_of(deployment).nearness, n.node_id))
    for node in nearest:
        if node.tier_of(deployment) is LoadTier.REMOTE:
            return _import(ctx, deployment, node) if _nowhere(ctx, deployment) else None
        if _load(ctx, entry, deployment, node):
            return node
    return None


def _nowhere(ctx: EventContext, deployment: Deployment) -> bool:
    """Whether no node that takes the deployment has its model."""
    takers = [n for n in ctx.cell.nodes.values() if ctx.takes(n, deployment.spec)]
    importing = [n.prefetches.importing for n in takers]
    model_id = deployment.model.model_id
    return all(n.tier_of(deployment) is LoadTier.REMOTE for n in takers) and not any(
        ahead is not None and ahead.model_id == model_id for ahead in importing
    )


def _import(ctx: EventContext, deployment: Deployment, node: NodeEntry) -> NodeEntry:
    ctx.cell.prefetches.note_begun()
    number = ctx.cell.prefetches.said.begun
    ahead = ImportAhead(
        operation_id=OperationId(f"prefetch-{ctx.epoch}-{number}"),
        model_id=deployment.model.model_id,
        begun_s=ctx.now_s,
    )
    node.prefetches.begin(ahead)
    command = ImportModel(
        operation_id=ahead.operation_id,
        source=deployment.model.source,
        weights=deployment.spec.weights,
    )
    ctx.act(SendCommand(link_id=node.link_id, command=command))
    return node


def _load(
    ctx: EventContext, entry: DeploymentEntry, deployment: Deployment, node: NodeEntry
) -> bool:
    """Load the model for nobody, if whoever calls another meanwhile would not wait for long, and
    there is room within the node's budget.
    """
    footprint = node.footprint_of(deployment)
    victims = _room(entry, deployment, node, footprint)
    if victims is None:
        return False
    planned = plan_load(ctx, deployment, node, victims)
    if planned.load_s > ctx.limits.prefetch_load_s_max:
        return False
    ctx.cell.prefetches.note_begun()
    # Needed by nobody: all other loads go before it.
    room = Room(kv_blocks=PARKED_BLOCKS, reclaim=victims)
    load(ctx, entry, node, room, planned, inf, ahead=True)
    return True


def _room(
    entry: DeploymentEntry, deployment: Deployment, node: NodeEntry, footprint: Footprint
) -> tuple[InstanceId, ...] | None:
    """Which idle instances give way to one more that is loaded ahead; None where it has no room.
    What was loaded ahead, too, goes before the others: the budget is for both.
    """
    size_bytes = footprint.instance_bytes(PARKED_BLOCKS) - node.spared_bytes(deployment)
    ahead = [i for i in node.instances.values() if i.ahead]
    over_bytes = freed_bytes(ahead) + size_bytes - node.hello.prefetch_bytes
    lesser = [i for i in node.reclaimable_instances(deployment) if _is_lesser(i, entry)]
    within = enough([i for i in lesser if i.ahead], over_bytes)
    if over_bytes > 0 and not within:
        return None
    missing_bytes = size_bytes - node.free_bytes
    more = enough([i for i in lesser if i not in within], missing_bytes - freed_bytes(within))
    victims = tuple([instance.instance_id for instance in (*within, *more)])
    share = node.share_of(deployment)
    return victims if node.station.freed_bytes(victims, share) >= missing_bytes else None


def _is_lesser(instance: InstanceEntry, than: DeploymentEntry) -> bool:
    """Whether it may go, is past its keep-alive, and far less likely to be called."""
    rests = instance.ahead or instance.state is InstanceState.PARKED
    return rests and instance.node.calls_log(instance) + LIKELIER < than.calls_log


def import_ended(ctx: EventContext, node: NodeEntry, said: ImportDone | ImportFailed) -> None:
    """What an import that nobody waits for came to; others are not its business."""
    ahead = node.prefetches.importing
    if ahead is None or ahead.operation_id != said.operation_id:
        return
    stored = isinstance(said, ImportDone) and said.model.model_id == imported_id(ahead.model_id)
    node.prefetches.end(stored=stored)
    if stored:
        node.note_stored(ahead.model_id)
    else:
        ctx.cell.prefetches.note_wasted()


def _check_time(ctx: EventContext, node: NodeEntry) -> None:
    ahead = node.prefetches.importing
    if ahead is not None and ctx.now_s - ahead.begun_s > ctx.limits.prefetch_s_max:
        node.prefetches.end(stored=False)
        ctx.cell.prefetches.note_wasted()
        command = CancelImport(operation_id=ahead.operation_id)
        ctx.act(SendCommand(link_id=node.link_id, command=command))
