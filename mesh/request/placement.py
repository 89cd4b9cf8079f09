"""Where a new instance goes: the first node in the policy's order that has room and time for it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId
from mesh.domain.model import Footprint
from mesh.domain.steps import LoadTier
from mesh.memory.demand import kv_blocks_within
from mesh.policy.interface import NodeView, Policy, Rank

R = TypeVar("R")


class StartNode(NodeView, Protocol):
    """A node as the start of an instance sees it."""

    @property
    def capacity_bytes(self) -> int: ...
    def footprint_of(self, deployment: Deployment) -> Footprint:
        """What the deployment's model takes on this node's engine, stated or estimated."""
        ...

    def tier_of(self, deployment: Deployment) -> LoadTier:
        """From where this node would load the deployment's model."""
        ...

    def reclaimable(self, sparing: Deployment | None = None) -> Sequence[tuple[InstanceId, int]]:
        """Idle instances that may be unloaded now, longest idle first, with their bytes; last those
        whose weights a load of the deployment would take.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load a new instance with so many KV blocks on `node`, in the place of idle ones."""

    node: StartNode
    footprint: Footprint
    kv_blocks: int
    reclaim: tuple[InstanceId, ...] = ()
    """Instances to unload for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTime:
    """Nodes with room have other requests to compute, whose SLOs they could not keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """What the node that comes nearest would have to hold, and its capacity. Both 0: no node."""

    needed_bytes: int
    largest_bytes: int

    @classmethod
    def nearest(cls, needs: Iterable[tuple[int, int]]) -> Self:
        """Of nodes, by what each would have to hold and its capacity."""
        needed_bytes, capacity_bytes = min(needs, key=lambda of: of[0] - of[1], default=(0, 0))
        return cls(needed_bytes=needed_bytes, largest_bytes=capacity_bytes)

    @property
    def in_vain(self) -> bool:
        """No node could hold it, were it empty."""
        return not self.largest_bytes or self.needed_bytes > self.largest_bytes


def place_instance(
    deployment: Deployment,
    nodes: Sequence[StartNode],
    *,
    kv_blocks: Callable[[StartNode, Footprint], tuple[int, int]],
    policy: Policy,
    has_time: Callable[[StartNode], bool | None],
    looks_max: int,
) -> Start | NoRoom | NoTime:
    """Where a new instance goes: the first node with room, else the first that idle instances can
    make room on. `kv_blocks` says how many it needs there at least and how many are wanted.
    `has_time` says whether a node could compute for it; it is asked only of nodes that have room,
    until it says None: no more of them can be looked at. If more than `looks_max` have room, half
    of the looks go to the first of them, and half to the last: they have the least to do. Of nodes
    that the policy would tell apart by their ids alone, those that have it nearer come first.
    """
    ordered = _ordered(deployment, nodes, policy)
    full: list[tuple[StartNode, Footprint, int]] = []
    roomy: list[tuple[StartNode, Footprint, int]] = []
    for node in ordered:
        footprint = node.footprint_of(deployment)
        least, wanted = kv_blocks(node, footprint)
        blocks = kv_blocks_within(footprint, least=least, wanted=wanted, free_bytes=node.free_bytes)
        if blocks is None:
            full.append((node, footprint, least))
        else:
            roomy.append((node, footprint, blocks))
    busy = False
    for node, footprint, blocks in _ends(roomy, looks_max):
        in_time = has_time(node)
        if in_time:
            return Start(node=node, footprint=footprint, kv_blocks=blocks)
        if in_time is None:
            return NoTime()
        busy = True
    for node, footprint, least in full:
        if node.device not in policy.reclaims:
            continue
        missing_bytes = footprint.instance_bytes(least) - node.free_bytes
        victims = enough(node.reclaimable(deployment), missing_bytes)
        if not victims:
            continue
        in_time = has_time(node)
        if in_time:
            return Start(node=node, footprint=footprint, kv_blocks=least, reclaim=victims)
        if in_time is None:
            return NoTime()
        busy = True
    if busy:
        return NoTime()
    return NoRoom.nearest((f.instance_bytes(least), n.capacity_bytes) for n, f, least in full)


def _ends(roomy: list[R], looks_max: int) -> list[R]:
    """Of more than may be looked at the first half and the last, that one first; and one more, at
    which it shows that there were others.
    """
    if len(roomy) <= looks_max:
        return roomy
    last = looks_max // 2
    first = looks_max - last
    return [*roomy[:first], *roomy[: -last - 1 : -1], roomy[first]]


def _ordered(deployment: Deployment, nodes: Sequence[StartNode], policy: Policy) -> list[StartNode]:
    tiers = {node.node_id: node.tier_of(deployment) for node in nodes}

    def nearest_first(node: StartNode) -> Rank:
        *alike, node_id = policy.node_rank(node)
        return *alike, -tiers[node.node_id].nearness, node_id

    one = next(iter(tiers.values()), None)
    differ = any(tier is not one for tier in tiers.values())
    return sorted(nodes, key=nearest_first if differ else policy.node_rank)


def enough(idle: Sequence[tuple[InstanceId, int]], missing_bytes: int) -> tuple[InstanceId, ...]:
    """The first of the idle instances that together free what is missing; none if all do not."""
    taken: list[InstanceId] = []
    for instance_id, size_bytes in idle:
        if missing_bytes <= 0:
            break
        taken.append(instance_id)
        missing_bytes -= size_bytes
    return tuple(taken) if missing_bytes <= 0 else ()
