"""`lru-swap`: an instance has a fixed quota of KV cache, the least recently used one gives way.

The simplest policy that serves more models than fit: no promise, no validation, turns by turns. The
example of mesh/policy/README.md; try it with `mesh sim workloads/faults.toml --check --policy` and
this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.domain.reasons import Verdict
from mesh.policy.default_answers import DefaultAnswers, releases
from mesh.policy.interface import KvDemand, KvSize, Rank, Tests
from mesh.policy.plans import Join, Plan, Release, Releases, Shortage
from mesh.policy.room import enough
from mesh.policy.rules.alternate import ALTERNATE
from mesh.policy.rules.turns import TurnRule
from mesh.policy.views import CellView, InstanceView, NodeView, Place


@dataclass(frozen=True, kw_only=True)
class LruSwap(DefaultAnswers):
    quota_blocks: int = 64
    """KV cache of an instance; a longer context than that still gets what it needs."""
    batch_max: int = 8
    name: str = "lru-swap"
    rule: TurnRule = ALTERNATE
    promises: bool = False
    prefetches: bool = False

    def instance_rank(self, instance: InstanceView) -> Rank:
        return (instance.batch,)  # the least busy first

    def node_rank(self, node: NodeView) -> Rank:
        return (-node.free_bytes,)

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        if isinstance(plan, Join) and plan.instance.batch >= self.batch_max:
            return Shortage(message=f"each instance serves {self.batch_max} requests at a time")
        return Verdict.PASSES

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        by_use = sorted(cell.idle(place), key=lambda i: (i.idle_since_s, i.instance_id))
        yield releases(enough(by_use, missing_bytes))

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        return 60.0  # it stays until its memory is wanted

    def kv(self, demand: KvDemand) -> KvSize:
        blocks = max(self.quota_blocks, demand.required_blocks)
        return KvSize(required_blocks=blocks, wanted_blocks=blocks, kept_blocks_max=blocks)


POLICY = LruSwap()
