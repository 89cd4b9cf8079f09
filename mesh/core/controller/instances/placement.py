"""Where a new instance starts, as the controller decides it: memory, time, and its partition.

`mesh.request.placement` chooses among the nodes; what each of them could do for the instance is
read from the cell here. Before: `instances.lifecycle`, which starts it, or a preemption, which
only asks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from mesh.core.controller.instances.kv_cache import blocks_for_load
from mesh.core.controller.instances.loading_lane import Slot, lane_ends_s, slot_for
from mesh.core.controller.instances.node_schedule import (
    Forecast,
    decodes_share,
    forecast_on_start,
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

MARGIN_SHARE = 0.1
"""Of the time to a first token that comes after a load, by which it may well be later."""


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


def find_room(
    ctx: EventContext,
    entry: DeploymentEntry,
    among: Iterable[NodeEntry],
    *,
    waiting: Iterable[RequestEntry],
    wanted: Wanted | None,
) -> Placed | NoRoom | NoTime:
    """Where an instance for those who wait could start. Nodes come into question only when no other
    will do, where its last load failed, or where it would have to wait for others' loads and could
    hardly be in time then.
    """
    deployment = entry.deployment
    assert deployment is not None
    taken = [i.node for i in entry.instances.values()]
    nodes = [n for n in among if ctx.takes(n, entry.spec) and n not in taken]
    fresh = [n for n in nodes if n.node_id not in entry.avoided]

    validates = wanted is not None and ctx.policy.validates
    looked: dict[NodeId, tuple[Slot, Forecast]] = {}
    tight: list[NodeEntry] = []

    def has_time(node: StartNode) -> bool | None:
        if wanted is None or not validates or node in tight:
            return True
        if not ctx.validations_left:
            ctx.cell.refusals.note_not_all_tried(entry.spec.name)
            return None
        ctx.note_validation()
        known = ctx.cell.nodes[node.node_id]
        slot, forecast = looked[node.node_id] = _forecast(ctx, entry, known, wanted)
        passes = forecast.verdict is Verdict.PASSES
        if passes and not wanted.late and _is_tight(ctx, known, slot, forecast, wanted.by):
            tight.append(known)
            return False
        return passes

    kv_blocks = _kv_blocks(ctx, entry, deployment, waiting)

    def place(among: list[NodeEntry]) -> Start | NoRoom | NoTime:
        return place_instance(
            deployment,
            among,
            kv_blocks=kv_blocks,
            policy=ctx.policy,
            has_time=has_time,
            looks_max=ctx.limits.validations_max if validates else len(among),
        )

    found = place(fresh)
    if isinstance(found, NoTime) and tight:
        found = place(tight[:1])
    if isinstance(found, NoRoom | NoTime) and len(fresh) < len(nodes):
        found = place(nodes)
    if not isinstance(found, Start):
        return found
    return _placed(ctx, deployment, found, wanted, looked.get(found.node.node_id))


def _kv_blocks(
    ctx: EventContext,
    entry: DeploymentEntry,
    deployment: Deployment,
    waiting: Iterable[RequestEntry],
) -> Callable[[StartNode, Footprint], tuple[int, int]]:
    """KV blocks of an instance by node, the least and what is wanted; once for nodes alike."""
    sizes: dict[tuple[Footprint, int, str], tuple[int, int]] = {}

    def kv_blocks(node: StartNode, footprint: Footprint) -> tuple[int, int]:
        known = ctx.cell.nodes[node.node_id]
        kind = (footprint, node.capacity_bytes, known.hello.fingerprint)
        if kind not in sizes:
            partition = partition_of(ctx, entry, deployment, known)
            sizes[kind] = (
                blocks_for_load(ctx, entry, waiting, footprint, deployment.context_tokens_max)
                if partition is None
                else (partition.kv_blocks, partition.kv_blocks)
            )
        return sizes[kind]

    return kv_blocks


def _is_tight(
    ctx: EventContext, node: NodeEntry, slot: Slot, forecast: Forecast, request: RequestEntry
) -> bool:
    """Whether its load waits for others, and a little delay would make the request late."""
    margin_s = MARGIN_SHARE * (forecast.first_token_s - ctx.now_s)
    waits = lane_ends_s(node, ctx.now_s) > ctx.now_s
    return waits and forecast.first_token_s + margin_s > request.due_s


def _placed(
    ctx: EventContext,
    deployment: Deployment,
    found: Start,
    wanted: Wanted | None,
    looked: tuple[Slot, Forecast] | None,
) -> Placed:
    """When the load is needed: as early as the request can bear, where that was looked at."""
    if wanted is None or looked is None:
        node = ctx.cell.nodes[found.node.node_id]
        needed_s = wanted.by.due_s if wanted is not None else ctx.now_s
        slot = slot_for(node, load_s(ctx, deployment, node), needed_s, ctx.now_s)
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


def _forecast(
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, wanted: Wanted
) -> tuple[Slot, Forecast]:
    """What becomes of whoever wants an instance there, which is noted where it is in vain."""
    request = wanted.by
    late = wanted.late or (request.accepted and not wanted.moves)
    slot, forecast = forecast_on_node(ctx, entry, node, request, late=late, moves=wanted.moves)
    verdict = forecast.verdict
    if not wanted.late:
        ctx.cell.refusals.note_start(entry.spec.name, request, node, verdict)
    if verdict is not Verdict.PASSES:
        request.refusals.note(verdict)
    return slot, forecast


def forecast_on_node(
    ctx: EventContext,
    entry: DeploymentEntry,
    node: NodeEntry,
    request: RequestEntry,
    *,
    late: bool = False,
    moves: bool = False,
) -> tuple[Slot, Forecast]:
    """The place in the node's lane of a load for the request, and what becomes of it there."""
    deployment = entry.deployment
    assert deployment is not None
    # One that is late waits for those that need not be.
    needed_s = inf if late else request.due_s
    slot = slot_for(node, load_s(ctx, deployment, node), needed_s, ctx.now_s)
    forecast = forecast_on_start(
        node,
        ctx.cell.expectations.profile(deployment.model, node.footprint_of(deployment), node.hello),
        slot.ready_s,
        request,
        share=ctx.share_of(node, decodes_share),
        now_s=ctx.now_s,
        limits=ctx.limits,
        late=late,
        moves=moves,
    )
    return slot, forecast


def has_room(
    ctx: EventContext, entry: DeploymentEntry, node: NodeEntry, request: RequestEntry
) -> bool:
    """Whether the least instance that takes the request fits, were all that idles there to go."""
    deployment = entry.deployment
    assert deployment is not None
    footprint = node.footprint_of(deployment)
    partition = partition_of(ctx, entry, deployment, node)
    if partition is None:
        context = deployment.context_tokens_max
        least, _ = blocks_for_load(ctx, entry, (request,), footprint, context)
    else:
        least = partition.kv_blocks
    lacking_bytes = footprint.instance_bytes(least) - node.free_bytes
    if lacking_bytes > 0 and node.device in ctx.policy.reclaims:
        lacking_bytes -= sum(size_bytes for _, size_bytes in node.reclaimable())
    return lacking_bytes <= 0


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
    """Validation finds out how many requests a node can serve; without it, its partition does."""
    partition = partition_of(ctx, entry, deployment, node)
    if partition is None or ctx.policy.validates:
        return ctx.limits.batch_max
    return min(partition.batch_max, ctx.limits.batch_max)
