"""Where a new instance starts, as the controller decides it: memory, time, and its partition.

`mesh.request.placement` chooses among the nodes; what each of them could do for the instance is
read from the cell here. Before: `instances.lifecycle`, which starts it, or a preemption, which
only asks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from mesh.core.controller.instances.kv_cache import blocks_for_load
from mesh.core.controller.instances.loading_lane import Slot, slot_for
from mesh.core.controller.instances.node_schedule import (
    Forecast,
    decodes_share,
    forecast_on_start,
    start_exceeds_pace,
)
from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.deployment import DeploymentEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.core.controller.state.request import RequestEntry
from mesh.domain.deployment import Deployment, DeploymentSpec
from mesh.domain.ids import NodeId
from mesh.domain.lifecycle import NodeState
from mesh.domain.model import Footprint
from mesh.request.partitions import Partition, partition_for
from mesh.request.placement import NoRoom, NoTime, Start, StartNode, place_instance
from mesh.request.shadow import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An instance is wanted by a request, which is to be in time there, unless it may be `late`.
    One that `moves` runs well where it is, and is not to be late.
    """

    by: RequestEntry
    late: bool = False
    moves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where an instance starts, its load's place in the lane there, and when the request that wants
    it would have its first token.
    """

    start: Start
    slot: Slot
    needed_s: float
    """When the load has to be over."""
    first_token_s: float


class _Demand:
    """What an instance for those who wait needs of a node; worked out once a kind of node."""

    def __init__(
        self,
        ctx: EventContext,
        entry: DeploymentEntry,
        deployment: Deployment,
        waiting: Iterable[RequestEntry],
    ) -> None:
        self._ctx, self._entry, self._deployment = ctx, entry, deployment
        self._waiting = waiting
        self._known: dict[tuple[str, str, int], tuple[int, int]] = {}
        """By engine, device and capacity."""

    def kv_blocks(self, node: StartNode, footprint: Footprint) -> tuple[int, int]:
        """At least, and recommended."""
        known = self._ctx.cell.nodes[node.node_id]
        kind = (known.hello.engine, known.hello.fingerprint, node.capacity_bytes)
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = self._worked_out(known, footprint)
        return found

    def least_bytes(self, node: NodeEntry) -> int:
        """Of the whole instance."""
        footprint = node.footprint_of(self._deployment)
        return footprint.instance_bytes(self.kv_blocks(node, footprint)[0])

    def _worked_out(self, node: NodeEntry, footprint: Footprint) -> tuple[int, int]:
        partition = partition_of(self._ctx, self._entry, self._deployment, node)
        if partition is not None:
            return partition.kv_blocks, partition.kv_blocks
        context = self._deployment.context_tokens_max
        return blocks_for_load(self._ctx, self._entry, self._waiting, footprint, context)


def find_room(
    ctx: EventContext,
    entry: DeploymentEntry,
    among: Iterable[NodeEntry],
    *,
    waiting: Iterable[RequestEntry],
    wanted: Wanted | None,
) -> Placed | NoRoom | NoTime:
    """Where an instance for those who wait could start. Nodes where its last load failed come into
    question only when no other has room.
    """
    deployment = entry.deployment
    assert deployment is not None
    taken = [i.node for i in entry.instances.values()]
    nodes = [n for n in among if ctx.takes(n, entry.spec) and n not in taken]

    validates = wanted is not None and ctx.policy.validates
    looked: dict[NodeId, tuple[Slot, Forecast] | None] = {}

    def has_time(node: StartNode) -> bool | None:
        if wanted is None or not validates:
            return True
        if not ctx.validations_left:
            ctx.cell.refusals.note_not_all_tried(entry.spec.name)
            return None
        ctx.note_validation()
        looked[node.node_id] = _in_time(ctx, entry, ctx.cell.nodes[node.node_id], wanted)
        return looked[node.node_id] is not None

    demand = _Demand(ctx, entry, deployment, waiting)

    def has_room(node: NodeEntry) -> bool:
        needed_bytes = demand.least_bytes(node)
        if needed_bytes <= ctx.obtainable_bytes(node):
            return True
        if wanted is not None and not wanted.late:
            ctx.cell.refusals.note_no_room(entry.spec.name, wanted.by, node, needed_bytes)
        return False

    def place(among: list[NodeEntry]) -> Start | NoRoom | NoTime:
        return place_instance(
            deployment,
            among,
            kv_blocks=demand.kv_blocks,
            policy=ctx.policy,
            has_time=has_time,
            looks_max=ctx.limits.validations_max if validates else len(among),
        )

    roomy = [n for n in nodes if has_room(n)]
    fresh = [n for n in roomy if n.node_id not in entry.avoided]
    found = place(fresh) if fresh else None
    if not isinstance(found, Start) and len(fresh) < len(roomy):
        found = place(roomy)
    if found is None or isinstance(found, NoRoom):
        return NoRoom.nearest((demand.least_bytes(n), n.capacity_bytes) for n in nodes)
    if isinstance(found, NoTime):
        return found
    return _placed(ctx, deployment, found, wanted, looked.get(found.node.node_id))


def _placed(
    ctx: EventContext,
    deployment: Deployment,
    found: Start,
    wanted: Wanted | None,
    looked: tuple[Slot, Forecast] | None,
) -> Placed:
    """When the load is needed: as late as the request can bear, where that was looked at. One that
    no request wants goes behind those that were promised.
    """
    if wanted is None or looked is None:
        node = ctx.cell.nodes[found.node.node_id]
        needed_s = wanted.by.due_s if wanted is not None else inf
        slot = slot_for(node, load_s(ctx, deployment, node), needed_s, ctx.now_s)
        if wanted is None:
            needed_s = slot.ready_s
        return Placed(start=found, slot=slot, needed_s=needed_s, first_token_s=slot.ready_s)
    slot, forecast = looked
    spare_s = max(wanted.by.due_s - forecast.first_token_s, 0.0)
    return Placed(
        start=found,
        slot=slot,
        needed_s=slot.ready_s + spare_s,
        first_token_s=forecast.first_token_s,
    )


def why_no_node(ctx: EventContext, spec: DeploymentSpec, purpose: str = "") -> tuple[str, str]:
    """Where no node takes instances of a deployment: what is missing, and what to do about it."""
    usable = [d for d in spec.devices if d in ctx.policy.devices]
    nodes = [n for n in ctx.cell.nodes.values() if n.device in usable]
    spans = [n.hello.tensor_parallel_max for n in nodes if n.state is NodeState.READY]
    widest = max(spans, default=0)
    if not 0 < widest < spec.tensor_parallel:
        devices = " or ".join(spec.devices)
        return f"no {devices} node is up{purpose}", "start one with `mesh node --join …`"
    message = (
        f"instances of {spec.name!r} are to span {spec.tensor_parallel} devices "
        f"(tensor_parallel); those of the nodes that are up can span {widest}"
    )
    return message, f"deploy it with tensor_parallel: {widest}, or start a node whose engine can"


def _in_time(
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, wanted: Wanted
) -> tuple[Slot, Forecast] | None:
    """The load's place in the node's lane, and what becomes of the request there. None where that
    would not do, for a reason that the request knows then.
    """
    deployment, request = entry.deployment, wanted.by
    assert deployment is not None
    footprint = node.footprint_of(deployment)
    profile = ctx.cell.expectations.profile(deployment.model, footprint, node.hello)
    share = ctx.share_of(node, decodes_share)
    verdict = Verdict.TPOT_EXCEEDED
    if not start_exceeds_pace(node, profile, request, share=share, moves=wanted.moves):
        late = wanted.late or (request.accepted and not wanted.moves)
        # One that is late waits for those that need not be.
        needed_s = inf if late else request.due_s
        slot = slot_for(node, load_s(ctx, deployment, node), needed_s, ctx.now_s)
        forecast = forecast_on_start(
            node,
            profile,
            slot.ready_s,
            request,
            share=share,
            now_s=ctx.now_s,
            limits=ctx.limits,
            late=late,
            moves=wanted.moves,
        )
        verdict = forecast.verdict
    if not wanted.late:
        ctx.cell.refusals.note_start(entry.spec.name, request, node, verdict)
    if verdict is Verdict.PASSES:
        return slot, forecast
    request.refusals.note(verdict)
    return None


def load_s(ctx: EventContext, deployment: Deployment, node: NodeEntry) -> float:
    """Seconds that a load on the node is expected to take, from where it would come."""
    weights_bytes = node.footprint_of(deployment).weights_bytes
    return ctx.cell.expectations.load_s(node.hello, weights_bytes, node.tier_of(deployment))


def partition_of(
    ctx: EventContext, entry: DeploymentEntry, deployment: Deployment, node: NodeEntry
) -> Partition | None:
    """What an instance gets of the node, where the policy cuts nodes into partitions."""
    if ctx.policy.partitions is None:
        return None
    footprint = node.footprint_of(deployment)
    return partition_for(
        ctx.cell.expectations.profile(deployment.model, footprint, node.hello),
        footprint,
        capacity_bytes=node.capacity_bytes,
        partitions_max=ctx.policy.partitions,
        context_tokens=deployment.context_tokens_max,
        tpot_s=entry.spec.slo.tpot_s,
    )


def batch_max(
    ctx: EventContext, entry: DeploymentEntry, deployment: Deployment, node: NodeEntry
) -> int:
    """What the node's engine can carry: validation and memory find out how many requests it can
    serve; without validation, its partition does.
    """
    most = min(node.hello.batch_max, ctx.limits.batch_max)
    partition = partition_of(ctx, entry, deployment, node)
    if partition is None or ctx.policy.validates:
        return most
    return min(partition.batch_max, most)
