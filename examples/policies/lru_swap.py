"""`lru-swap`: an instance has a fixed quota of KV cache, the least recently used one gives way.

The simplest policy that serves more models than fit: no promise, no validation, turns by turns. The
example of mesh/policy/README.md; try it with `mesh sim workloads/faults.toml --check --policy` and
this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.domain.node_rule import DEFAULT_RULE, NodeRule
from mesh.domain.reasons import DeviceKind, Verdict
from mesh.domain.slo import PACE, Pace, Slo
from mesh.policy.interface import KvDemand, KvSize, Rank, Tests
from mesh.policy.plans import Join, Plan, Release, Start
from mesh.policy.room import enough, roomy_first
from mesh.policy.rules.alternate import ALTERNATE
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, NodeView, RequestView


@dataclass(frozen=True, kw_only=True)
class LruSwap:
    quota_blocks: int = 64
    """KV cache of an instance; a longer context than that still gets what it needs."""
    batch_max: int = 8
    name: str = "lru-swap"
    rule: TurnRule = ALTERNATE
    node_rule: NodeRule = DEFAULT_RULE
    devices: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)
    promises: bool = False
    refuses_late: bool = True
    prefetches: bool = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return (instance.batch,)  # the least busy first

    def node_rank(self, node: NodeView) -> Rank:
        return (-node.free_bytes,)

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        if request is not None:
            for instance in cell.candidates():
                yield Join(request=request, instance=instance)
        for node in roomy_first(cell):
            yield Start(request=request, node=node)

    def passes(self, plan: Plan, tests: Tests) -> Verdict:
        full = isinstance(plan, Join) and plan.instance.batch >= self.batch_max
        return Verdict.TPOT_EXCEEDED if full else Verdict.PASSES

    def relieve(
        self, place: InstanceView | NodeView, missing_bytes: int, cell: CellView
    ) -> Iterator[tuple[Release, ...]]:
        by_use = sorted(cell.idle(place), key=lambda i: (i.idle_since_s, i.instance_id))
        yield tuple(Release(instance=instance) for instance in enough(by_use, missing_bytes))

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        return 60.0  # it stays until its memory is wanted

    def upkeep(self, cell: CellView) -> Iterator[Plan]:
        return iter(())

    def kv(self, demand: KvDemand) -> KvSize:
        blocks = max(self.quota_blocks, demand.required_blocks)
        return KvSize(
            required_blocks=blocks,
            wanted_blocks=blocks,
            kept_blocks_max=blocks,
            batch_max=self.batch_max,
        )

    def pace(self, slo: Slo) -> Pace:
        return PACE


POLICY = LruSwap()
