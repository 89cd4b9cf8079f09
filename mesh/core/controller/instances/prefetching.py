"""Models that come nearer before they are called: what the policy has fetched ahead, and when that
yields.

Asked several times a second. A model that no store has is imported; one that a short load brings up
is loaded for nobody and waits, idle, as a parked instance does: it is in the books, and goes when
anybody wants its memory. Before: the end of the policy's upkeep in `core`. After: the lanes of
loads and imports, and `lifecycle`, for whose loads all of this gives way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from mesh.core.controller.instances.kv_cache import PARKED_BLOCKS, Room, growth_bytes
from mesh.core.controller.instances.lifecycle import load
from mesh.core.controller.instances.node_schedule import plan_load
from mesh.core.controller.instances.open_options import OpenOptions, checked_releases
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.prefetches import ImportAhead
from mesh.domain.deployment import Deployment
from mesh.domain.ids import DeploymentName, OperationId
from mesh.domain.lifecycle import DeploymentState, NodeState
from mesh.domain.messages import CancelImport, ImportDone, ImportFailed, ImportModel
from mesh.domain.model import imported_id
from mesh.domain.reasons import DeviceKind, PolicyFaultKind
from mesh.domain.steps import LoadTier
from mesh.policy.plans import Plan, Prefetch, Release
from mesh.policy.room import freed_bytes
from mesh.policy.views import NodeView

SLOWDOWN_MAX = 1.05
"""Where iterations take longer than this beside a load, nothing is loaded ahead beside them."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Ahead(OpenOptions):
    """See `mesh.policy.views.AheadView`."""

    @property
    def parked_s_max(self) -> float:
        return self.ctx.limits.parked_s_max

    @property
    def load_s_max(self) -> float:
        return self.ctx.limits.prefetch_load_s_max

    def rests(self, node: NodeView) -> bool:
        there = self._node(node)
        instances, station = there.instances.values(), there.station
        return (
            there.state is NodeState.READY
            and (there.is_idle() or _loads_apart(there))
            and there.prefetches.importing is None
            and all(i.is_loaded and not i.expected and not i.profiling for i in instances)
            and not station.running_reservations()
            and not station.waiting()
            and all(operation.node is not there for operation in self.ctx.cell.operations.values())
        )

    def tier(self, node: NodeView) -> LoadTier:
        return self._node(node).tier_of(self._deployment())

    def about(self, name: DeploymentName) -> "_Ahead | None":
        ctx, entry = self.ctx, self.ctx.cell.deployments[name]
        if entry.deployment is None or entry.state is not DeploymentState.READY:
            return None
        if not ctx.may_start(entry):
            return None
        return _Ahead(ctx=ctx, entry=entry)

    def starts(self) -> Sequence[NodeEntry]:
        ctx, entry = self.ctx, self.entry
        assert entry is not None
        nodes = ctx.cell.nodes.values()
        deployment = self._deployment()
        found = [node for node in nodes if _may_fetch(ctx, entry, deployment, node)]
        return ctx.ranked(found, deployment)

    def needed_bytes(self, node: NodeEntry) -> int:
        return _size_bytes(node, self._deployment())

    def growth_bytes(self, node: NodeView) -> int:
        return growth_bytes(self.ctx, self._node(node))


def _loads_apart(node: NodeEntry) -> bool:
    """Whether a load hardly slows what the node computes, as measured: a copy beside the work of a
    GPU.
    """
    slowdown = node.load_slowdown if node.slowdown_known else inf
    return node.device is DeviceKind.GPU and slowdown <= SLOWDOWN_MAX


def prefetch(ctx: EventContext) -> None:
    """Carry out what the policy has brought nearer, as far as nodes allow it."""
    for node in ctx.cell.nodes.values():
        _check_time(ctx, node)
    if ctx.limits.parked_s_max > 0.0:
        for plan in ctx.policy.prefetch(_Ahead(ctx=ctx)):
            _carry_out(ctx, plan)


def _carry_out(ctx: EventContext, plan: Plan) -> None:
    """Begin a prefetch, if that may be: its node has to have a budget for it, and to be quick, and
    no other operation may be under way there, since one that waits could not give way.
    """
    if not isinstance(plan, Prefetch):
        ctx.policy.fault(PolicyFaultKind.NOT_IN_BOOKS, type(plan).__name__, "it is no prefetch")
        return
    entry = ctx.cell.deployments.get(plan.deployment)
    node = ctx.cell.nodes.get(plan.node.node_id)
    if entry is None or entry.deployment is None or node is None or node is not plan.node:
        message = f"no {plan.deployment} to fetch to {plan.node.node_id}"
        ctx.policy.fault(PolicyFaultKind.NOT_IN_BOOKS, "Prefetch", message)
    elif ctx.may_start(entry) and _may_fetch(ctx, entry, entry.deployment, node):
        if node.tier_of(entry.deployment) is not LoadTier.REMOTE:
            _load(ctx, entry, entry.deployment, node, plan)
        elif _nowhere(ctx, entry.deployment):
            _import(ctx, entry.deployment, node)


def _may_fetch(
    ctx: EventContext, entry: DeploymentEntry, deployment: Deployment, node: NodeEntry
) -> bool:
    has_budget = node.hello.prefetch_bytes > 0 and node.prefetches.importing is None
    begins = not node.station.running_reservations() and not node.station.waiting()
    may_try = has_budget and begins and node.prefetches.may_try(deployment.model.model_id)
    return may_try and ctx.takes_another(node, entry)


def _size_bytes(node: NodeEntry, deployment: Deployment) -> int:
    return node.footprint_of(deployment).instance_bytes(PARKED_BLOCKS)


def _nowhere(ctx: EventContext, deployment: Deployment) -> bool:
    """Whether no node that takes the deployment has its model."""
    takers = [n for n in ctx.cell.nodes.values() if ctx.takes(n, deployment.spec)]
    importing = [n.prefetches.importing for n in takers]
    model_id = deployment.model.model_id
    return all(n.tier_of(deployment) is LoadTier.REMOTE for n in takers) and not any(
        ahead is not None and ahead.model_id == model_id for ahead in importing
    )


def _import(ctx: EventContext, deployment: Deployment, node: NodeEntry) -> None:
    ctx.cell.prefetches.note_begun()
    number = ctx.cell.prefetches.view.begun
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
    ctx.send(node, command)


def _load(
    ctx: EventContext,
    entry: DeploymentEntry,
    deployment: Deployment,
    node: NodeEntry,
    plan: Prefetch,
) -> None:
    """Load the model for nobody, if whoever calls another meanwhile would not wait for long, and
    there is room within the node's budget, beside what those who run there may still need.
    """
    gone = checked_releases(ctx, node, [Release(instance=instance) for instance in plan.instead_of])
    if len(gone) < len(plan.instead_of):
        return
    victims = tuple([instance.instance_id for instance in gone])
    size_bytes = _size_bytes(node, deployment) - node.spared_bytes(deployment)
    missing_bytes = size_bytes + growth_bytes(ctx, node) - node.free_bytes
    freed = node.station.freed_bytes(victims, node.shared_weights_of(deployment))
    prefetched = [instance for instance in node.instances.values() if instance.prefetched]
    ahead_bytes = freed_bytes(prefetched) - freed_bytes([i for i in gone if i.prefetched])
    if freed < missing_bytes or ahead_bytes + size_bytes > node.hello.prefetch_bytes:
        return
    planned = plan_load(ctx, deployment, node, victims)
    if planned.load_s > ctx.limits.prefetch_load_s_max:
        return
    ctx.cell.prefetches.note_begun()
    # Needed by nobody: all other loads go before it.
    room = Room(kv_blocks=PARKED_BLOCKS, unloads=victims)
    load(ctx, entry, node, room, planned, inf, asked=False, prefetched=True)


def import_ended(ctx: EventContext, node: NodeEntry, report: ImportDone | ImportFailed) -> None:
    """What an import that nobody waits for came to; others are not its business."""
    ahead = node.prefetches.importing
    if ahead is None or ahead.operation_id != report.operation_id:
        return
    stored = isinstance(report, ImportDone) and report.model.model_id == imported_id(ahead.model_id)
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
        ctx.send(node, CancelImport(operation_id=ahead.operation_id))
