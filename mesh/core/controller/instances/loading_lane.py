"""The loads of a node, one after the other: when each is over, and when one more would be.

A node loads one instance from its disk at a time, and beside that it wakes one and imports the
model of one; of each kind the one that is needed first goes before the others, as its reservation
station starts them. Before:
`placement`, which begins loads, and `requests.cold_starts`, which promises them. After:
`node_schedule`, which validates with those who wait for them.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.instance import InstanceEntry
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.memory.station import ReservationKind

OVERDUE_SHARE = 0.25
"""A load that should have ended is expected to take this share of its expected time yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a load in its node's lane."""

    ready_s: float
    """When it is over."""


def load_s(
    ctx: EventContext,
    deployment: Deployment,
    node: NodeEntry,
    without: Collection[InstanceId] = (),
) -> float:
    """Seconds that a load on the node is planned with, from where it would come `without` the
    instances that go for it.
    """
    weights_bytes = node.footprint_of(deployment).weights_bytes
    tier, beside = node.tier_of(deployment, without), node.computes_beside_load()
    return ctx.cell.expectations.load_s(node.hello, weights_bytes, tier, beside=beside)


def loads_end_s(node: NodeEntry, now_s: float) -> dict[InstanceId, float]:
    """When each load of the node is expected to be over, those of a kind in that order."""
    ends_s: dict[InstanceId, float] = {}
    lanes_s: dict[ReservationKind, float] = {}
    for instance in _in_order(node):
        kind = _kind(node, instance)
        at_s = lanes_s.get(kind, now_s)
        if node.station.running(instance.instance_id):
            expected_s = instance.load_started_s + instance.load_s
            if expected_s <= now_s:
                expected_s = now_s + instance.load_s * OVERDUE_SHARE
            at_s = max(at_s, expected_s)
        else:
            at_s += instance.load_s
        ends_s[instance.instance_id] = lanes_s[kind] = at_s
    return ends_s


def lane_ends_s(node: NodeEntry, now_s: float, kind: ReservationKind) -> float:
    """When all loads of a kind are."""
    return max((end_s for _, end_s in _lane(node, now_s, kind)), default=now_s)


def _lane(
    node: NodeEntry, now_s: float, kind: ReservationKind
) -> Iterator[tuple[InstanceEntry, float]]:
    """The loads of a kind in their order, and when each is over."""
    for instance_id, end_s in loads_end_s(node, now_s).items():
        instance = node.instances[instance_id]
        if _kind(node, instance) is kind:
            yield instance, end_s


def _kind(node: NodeEntry, instance: InstanceEntry) -> ReservationKind:
    return node.station.load_kind(instance.instance_id) or ReservationKind.LOAD


def _in_order(node: NodeEntry) -> list[InstanceEntry]:
    station = node.station
    loading = [i for i in node.instances.values() if not i.loaded_at_s and _loads(node, i)]
    if len(loading) < 2:
        return loading
    return sorted(loading, key=lambda i: (station.running(i.instance_id) is None, i.needed_s))


def _loads(node: NodeEntry, instance: InstanceEntry) -> bool:
    """Whether its load is under way or to come; a load that was given up goes on to its end."""
    if instance.state is InstanceState.LOADING:
        return True
    given_up = instance.state is InstanceState.UNLOADING
    return given_up and node.station.running(instance.instance_id) is not None


def next_slot(
    ctx: EventContext,
    deployment: Deployment,
    node: NodeEntry,
    needed_s: float,
    without: Collection[InstanceId],
) -> Slot:
    """The place in the lane of one more load on the node, as it is planned, `without` as above."""
    seconds = load_s(ctx, deployment, node, without)
    return slot_for(node, node.load_kind_of(deployment, without), seconds, needed_s, ctx.now_s)


def slot_for(
    node: NodeEntry, kind: ReservationKind, load_s: float, needed_s: float, now_s: float
) -> Slot:
    """Where in the lane of its kind one more load goes, which is needed by `needed_s`: before those
    that are needed later, or behind all if one of them would be late then.
    """
    before_s, last_s, delays = now_s, now_s, False
    for other, end_s in _lane(node, now_s, kind):
        last_s = end_s
        if node.station.running(other.instance_id) or other.needed_s <= needed_s:
            before_s = end_s
        elif end_s <= other.needed_s < end_s + load_s:
            delays = True
    return Slot(ready_s=(last_s if delays else before_s) + load_s)
