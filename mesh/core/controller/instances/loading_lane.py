"""The loads of a node: when each is expected to be over, and when one more would be.

The node's reservation station (`mesh.memory.station`) alone decides in which order they run, and it
is asked here. This module knows how long each of them takes. Before: `requests.search`, which
begins loads and promises them. After: `node_schedule`, which validates with
those who wait for them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mesh.core.controller.state.context import EventContext
from mesh.core.controller.state.node import NodeEntry
from mesh.domain.deployment import Deployment
from mesh.domain.ids import InstanceId
from mesh.domain.lifecycle import InstanceState
from mesh.memory.station import NEWCOMER, ReservationKind

OVERDUE_SHARE = 0.25
"""A load that should have ended is expected to take this share of its expected time yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """What a load that has not been issued will be, from where its weights would come now."""

    kind: ReservationKind
    load_s: float
    """The seconds that it is planned with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a load among the others of its node."""

    load: PlannedLoad
    ready_s: float
    """When the load is over."""
    waits: bool = False
    """Whether others of its kind are under way, or wait, before it or behind it."""


def plan_load(
    ctx: EventContext,
    deployment: Deployment,
    node: NodeEntry,
    without: Collection[InstanceId] = (),
) -> PlannedLoad:
    """Plan a load on the node, `without` the instances that go for it."""
    weights_bytes = node.footprint_of(deployment).weights_bytes
    (tier, kind), beside = node.source_of(deployment, without), node.computes_beside_load()
    moved_bytes = node.load_bytes(weights_bytes, tier)
    seconds = ctx.cell.expectations.load_s(node.hello, moved_bytes, tier, beside=beside)
    return PlannedLoad(kind=kind, load_s=seconds)


def loads_end_s(
    node: NodeEntry, now_s: float, newcomer: tuple[PlannedLoad, float] | None = None
) -> dict[InstanceId, float]:
    """When each load of the node is expected to be over, in the order in which its station starts
    those of a kind. The `newcomer` is one more load, and when it is needed.
    """
    instances, station = node.instances, node.station

    def ends_s(name: InstanceId, start_s: float) -> float:
        if name == NEWCOMER:
            assert newcomer is not None
            return start_s + newcomer[0].load_s
        instance = instances[name]
        if not station.running(name):
            return start_s + instance.load_s
        expected_s = instance.load_started_s + instance.load_s
        return expected_s if expected_s > now_s else now_s + instance.load_s * OVERDUE_SHARE

    def cancelled(name: InstanceId) -> bool:
        return name != NEWCOMER and instances[name].state is InstanceState.UNLOADING

    added = None if newcomer is None else (newcomer[0].kind, newcomer[1])
    return station.forecast(now_s, ends_s, cancelled=cancelled, newcomer=added)


def lane_ends_s(node: NodeEntry, now_s: float, kind: ReservationKind) -> float:
    """When all loads of a kind are over."""
    return _last_s(node, loads_end_s(node, now_s), kind, now_s)


def _last_s(
    node: NodeEntry, ends_s: Mapping[InstanceId, float], kind: ReservationKind, now_s: float
) -> float:
    of_kind = (end_s for name, end_s in ends_s.items() if node.station.load_kind(name) is kind)
    return max(of_kind, default=now_s)


def slot_for(node: NodeEntry, load: PlannedLoad, needed_s: float, now_s: float) -> Slot:
    """When one more load would be over that is needed by `needed_s`: where the node's station would
    start it, or behind all others of its kind if one of them would be late because of it.
    """
    before_s = loads_end_s(node, now_s)
    if not before_s:
        return Slot(load=load, ready_s=now_s + load.load_s)
    beside_s = loads_end_s(node, now_s, newcomer=(load, needed_s))
    last_s = _last_s(node, before_s, load.kind, now_s)
    delays = any(
        end_s <= node.instances[name].needed_s < beside_s[name] for name, end_s in before_s.items()
    )
    if delays:
        return Slot(load=load, ready_s=last_s + load.load_s, waits=last_s > now_s)
    return Slot(load=load, ready_s=beside_s[NEWCOMER], waits=last_s > now_s)
