"""What a policy answers unless it says otherwise: the shared answers, made of the shared parts.

A policy derives from `DefaultAnswers` and overrides what it decides by itself. By default requests
join what is loaded before anything new starts, whatever idles gives way, and a cache is as large as
its requests need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh.domain.node_rule import DEFAULT_RULE, NodeRule
from mesh.domain.reasons import DeviceKind, Verdict
from mesh.domain.slo import PACE, Pace, Slo
from mesh.policy.interface import KvDemand, KvSize, Rank, Tests
from mesh.policy.plans import How, Plan, Release, Releases, Shortage
from mesh.policy.ranks import any_instance, fullest_node
from mesh.policy.room import (
    by_demand,
    enough,
    joins_first,
    late_by_load_alone,
    likeliest_nearer,
    longest_headroom,
    may_be_in_time,
)
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import (
    AheadView,
    CellView,
    InstanceView,
    NodeView,
    Outlook,
    Place,
    RequestView,
)


@dataclass(frozen=True, kw_only=True)
class DefaultAnswers:
    name: str
    rule: TurnRule = HEADROOM
    node_rule: NodeRule = DEFAULT_RULE
    devices: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)
    instances_per_node: int = 1
    promises: bool = True
    refuses_late: bool = True
    """Whether a request goes once its first token would be late wherever it went."""
    goes_on: bool = False
    """Whether it is asked where a request goes on with its first token."""
    upkeep_s: float = 1.0
    """The seconds between two calls of `upkeep`."""
    prefetches: bool = True
    """Whether nodes that rest load what may be called next."""

    def instance_rank(self, instance: InstanceView) -> Rank:
        return any_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        return joins_first(request, cell)

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        return tests.shadow(plan) if self.promises else Verdict.PASSES

    def waits(self, request: RequestView, outlook: Outlook) -> bool | Shortage:
        return not self.refuses_late or may_be_in_time(request, outlook, validated=self.promises)

    def may_be_late(self, request: RequestView, outlook: Outlook) -> bool:
        return late_by_load_alone(request, outlook)

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        yield releases(enough(cell.idle(place), missing_bytes))

    def evict(self, instance: InstanceView, cell: CellView) -> RequestView:
        return longest_headroom(cell.requests(instance))

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        return Release(instance=instance, how=How.UNLOAD if instance.is_parked else How.PARK)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        return iter(())

    def first_token(self, request: RequestView, cell: CellView) -> Iterator[Plan]:
        return iter(())

    def prefetch(self, cell: AheadView) -> Iterator[Plan]:
        return likeliest_nearer(cell) if self.prefetches else iter(())

    def kv(self, demand: KvDemand) -> KvSize:
        return by_demand(demand)

    def pace(self, slo: Slo) -> Pace:
        return PACE


def releases(instances: Sequence[InstanceView]) -> Releases:
    """They are unloaded together."""
    return tuple([Release(instance=instance) for instance in instances])
