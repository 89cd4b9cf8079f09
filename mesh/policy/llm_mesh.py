"""`llm-mesh`: headroom and shadow validation; CPU first, large batches first, full nodes first.

This is LLM-Mesh §4 to §7. Its parts can be left out one by one, as the paper's ablations do (§8.3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.domain.reasons import DeviceKind, Verdict
from mesh.policy.default_answers import DefaultAnswers, releases
from mesh.policy.interface import KvDemand, KvSize, Rank, Tests
from mesh.policy.partitions import kv_of_part
from mesh.policy.plans import Plan, Release, Releases, Shortage
from mesh.policy.ranks import any_instance, fullest_instance, fullest_node
from mesh.policy.room import by_demand, enough, freed_bytes, joins_first, longest_headroom, victims
from mesh.policy.views import CellView, InstanceView, NodeView, Place, RequestView


@dataclass(frozen=True, kw_only=True)
class LlmMesh(DefaultAnswers):
    name: str = "llm-mesh"
    shares: bool = True
    """Whether instances share a node token by token. If not, each has a node to itself."""
    preempts: bool = True
    """Whether requests of small instances move elsewhere for a large one (§7.1)."""
    consolidates: bool = True
    """Whether the small ones of several instances drain and go (§7.2)."""

    # §4: CPU nodes before GPU nodes, which are scarce. §7.2: the largest batch first, so that small
    # ones drain; the fullest node first, so that whole nodes stay free for large models.

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance) if self.consolidates else any_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)

    # §4: a request joins an instance of its model wherever it is in time; else one starts.

    def places(self, request: RequestView | None, cell: CellView) -> Iterator[Plan]:
        return joins_first(request, cell)

    # §5.3: shadow validation. The node's turns, which go to the least headroom (§5.1, the rule
    # HEADROOM), are rolled forward with the newcomer, and every token has to be in time.

    def passes(self, plan: Plan, tests: Tests) -> Verdict | Shortage:
        return tests.shadow(plan)

    # §6.2: a cache has what its requests need, by the lengths of earlier answers, and a watermark
    # more. §6.4: where that does not do, the request with the longest headroom is evicted.

    def kv(self, demand: KvDemand) -> KvSize:
        return by_demand(demand) if self.shares else kv_of_part(demand, parts=1)

    def evict(self, instance: InstanceView, cell: CellView) -> RequestView:
        return longest_headroom(cell.requests(instance))

    # Idle instances give way to whoever needs their memory. §7.1: where those do not do, instances
    # with a smaller batch give way, once each of their requests is in time elsewhere.

    def relieve(self, place: Place, missing_bytes: int, cell: CellView) -> Iterator[Releases]:
        idle = cell.idle(place)
        yield releases(enough(idle, missing_bytes))
        if self.preempts:
            missing_bytes -= freed_bytes(idle)
            yield releases(victims(cell.neighbours(place), place, missing_bytes))

    def idle(self, instance: InstanceView, cell: CellView) -> Release | float:
        return super().idle(instance, cell) if self.shares else Release(instance=instance)


LLM_MESH = LlmMesh()
ABLATIONS = (
    LlmMesh(name="llm-mesh-no-cpu", devices=(DeviceKind.GPU,)),
    LlmMesh(name="llm-mesh-no-sharing", shares=False, preempts=False, prefetches=False),
    LlmMesh(name="llm-mesh-no-defrag", preempts=False, consolidates=False),
    LlmMesh(name="llm-mesh-no-preemption", preempts=False),
)
