"""A policy composed of the shared parts, which its numbers leave in or out: what `llm-mesh`, its
ablations and the baselines are values of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from mesh.domain.node_rule import DEFAULT_RULE, NodeRule
from mesh.domain.reasons import DeviceKind, Verdict
from mesh.domain.slo import PACE, Pace, Slo
from mesh.policy.interface import KvDemand, KvSize, Rank, Tests
from mesh.policy.kv_sizes import by_demand
from mesh.policy.partitions import partition_for
from mesh.policy.plans import How, Join, Plan, Release, Start
from mesh.policy.ranks import any_instance, fullest_instance, fullest_node
from mesh.policy.room import enough, freed_bytes, roomy_first, victims
from mesh.policy.rules.headroom import HEADROOM
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, NodeView, RequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    name: str
    rule: TurnRule = HEADROOM
    node_rule: NodeRule = DEFAULT_RULE
    devices: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)
    partitions: int | None = None
    """Into how many equal partitions a node is cut, at most. An instance has one with all of its
    memory from its load to its end. None: instances share a node token by token, and memory moves
    between them.
    """
    reclaims: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)
    """Where an idle instance goes before its keep-alive is over, when its memory is wanted."""
    preempts: bool = True
    """Whether requests of small instances move elsewhere for a large one (LLM-Mesh §7.1)."""
    consolidates: bool = True
    """Whether the small ones of several instances drain and go (§7.2)."""
    promises: bool = True
    refuses_late: bool = True
    planned: Pace = PACE
    """The pace with which tokens are planned, whatever the SLO."""
    kv_tokens_least: int | None = None
    """The least KV cache in tokens that an instance serves with; `None` stands for the cell's
    setting.
    """
    kv_watermark_share: float | None = None
    """The share that a KV cache gets over what is required; `None` stands for the cell's
    setting.
    """

    @property
    def prefetches(self) -> bool:
        return self.partitions is None

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance) if self.consolidates else any_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        """Whatever is loaded, then new instances."""
        if request is not None:
            for instance in cell.candidates():
                yield Join(request=request, instance=instance)
        for node in roomy_first(cell):
            yield Start(request=request, node=node)

    def passes(self, plan: Plan, tests: Tests) -> Verdict:
        return tests.shadow(plan) if self.promises else Verdict.PASSES

    def relieve(
        self, place: InstanceView | NodeView, missing_bytes: int, cell: CellView
    ) -> Iterator[tuple[Release, ...]]:
        """Idle instances; smaller neighbours where those do not do."""
        idle = cell.idle(place) if place.device in self.reclaims else ()
        yield _releases(enough(idle, missing_bytes))
        if self.preempts:
            missing_bytes -= freed_bytes(idle)
            yield _releases(victims(cell.neighbours(place), place, missing_bytes))

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        parks = self.partitions is None and not instance.is_parked
        return Release(instance=instance, how=How.PARK if parks else How.UNLOAD)

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        return iter(())

    def kv(self, demand: KvDemand) -> KvSize:
        if self.partitions is None or demand.start is None:
            size = by_demand(demand, self.kv_tokens_least, self.kv_watermark_share)
            if self.partitions is not None:
                size.kept_blocks_max = inf
            return size
        partition = partition_for(demand.start, self.partitions)
        blocks = partition.kv_blocks
        batch_max = None if self.promises else partition.batch_max
        return KvSize(required_blocks=blocks, wanted_blocks=blocks, batch_max=batch_max)

    def pace(self, slo: Slo) -> Pace:
        return self.planned


def _releases(instances: Sequence[InstanceView]) -> tuple[Release, ...]:
    return tuple([Release(instance=instance) for instance in instances])
