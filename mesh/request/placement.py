"""Where a new instance goes: the first node in the policy's order that has room and time for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId
from mesh.domain.model import Footprint
from mesh.memory.demand import kv_blocks_within, least_instance_bytes
from mesh.policy.interface import NodeView, Policy


class StartNode(NodeView, Protocol):
    """A node as the start of an instance sees it."""

    @property
    def capacity_bytes(self) -> int: ...
    @property
    def leaving_bytes(self) -> int:
        """Reserved by instances that are being unloaded: free as soon as they have gone."""
        ...

    def footprint_of(self, deployment: Deployment) -> Footprint:
        """What the deployment's model takes on this node's engine, stated or estimated."""
        ...

    def reclaimable(self) -> Sequence[tuple[InstanceId, int]]:
        """Idle instances that may be unloaded now, longest idle first, with their bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load a new instance with so many KV blocks on `node`."""

    node: StartNode
    footprint: Footprint
    kv_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Unload these idle instances first; their memory is wanted."""

    instance_ids: tuple[InstanceId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A node has room as soon as what leaves it has gone: nothing more must be unloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTime:
    """Nodes with room have other requests to compute, whose SLOs they could not keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """What the node that comes nearest would have to hold, and its capacity. Both 0: no node."""

    needed_bytes: int
    largest_bytes: int

    @property
    def in_vain(self) -> bool:
        """No node could hold it, were it empty."""
        return not self.largest_bytes or self.needed_bytes > self.largest_bytes


def place_instance(
    deployment: Deployment,
    nodes: Sequence[StartNode],
    *,
    kv_tokens_wanted: int,
    policy: Policy,
    has_time: Callable[[StartNode], bool],
) -> Start | Wait | Reclaim | NoRoom | NoTime:
    """Where a new instance goes: the first node with room, else one where room is about to appear,
    else the first that idle instances can make room on. `has_time` says whether a node could
    compute for it; it is asked of the first ones that have room only.
    """
    ordered = sorted(nodes, key=policy.node_rank)
    busy: list[StartNode] = []
    for node in ordered:
        footprint = node.footprint_of(deployment)
        kv_blocks = kv_blocks_within(
            footprint,
            context_tokens_max=deployment.context_tokens_max,
            kv_tokens_wanted=kv_tokens_wanted,
            free_bytes=node.free_bytes,
        )
        if kv_blocks is not None:
            if has_time(node):
                return Start(node=node, footprint=footprint, kv_blocks=kv_blocks)
            busy.append(node)
    made = _make_room(deployment, [node for node in ordered if node not in busy], has_time)
    return NoTime() if busy and isinstance(made, NoRoom) else made


def _make_room(
    deployment: Deployment, ordered: Sequence[StartNode], has_time: Callable[[StartNode], bool]
) -> Wait | Reclaim | NoRoom | NoTime:
    needs = [
        (node, least_instance_bytes(node.footprint_of(deployment), deployment.context_tokens_max))
        for node in ordered
    ]
    missing = [(node, need - node.free_bytes - node.leaving_bytes) for node, need in needs]
    busy = False
    for node, missing_bytes in missing:
        if missing_bytes <= 0:
            if has_time(node):
                return Wait()
            busy = True
    for node, missing_bytes in missing:
        victims = _enough(node.reclaimable(), missing_bytes) if missing_bytes > 0 else ()
        if victims:
            if has_time(node):
                return Reclaim(instance_ids=victims)
            busy = True
    if busy:
        return NoTime()
    if not needs:
        return NoRoom(needed_bytes=0, largest_bytes=0)
    nearest, need = min(needs, key=lambda of: of[1] - of[0].capacity_bytes)
    return NoRoom(needed_bytes=need, largest_bytes=nearest.capacity_bytes)


def _enough(idle: Sequence[tuple[InstanceId, int]], missing_bytes: int) -> tuple[InstanceId, ...]:
    """The first of the idle instances that together free what is missing; none if all do not."""
    taken: list[InstanceId] = []
    for instance_id, size_bytes in idle:
        if missing_bytes <= 0:
            break
        taken.append(instance_id)
        missing_bytes -= size_bytes
    return tuple(taken) if missing_bytes <= 0 else ()
