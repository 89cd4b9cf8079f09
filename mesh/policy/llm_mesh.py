"""`llm-mesh`: headroom and shadow validation; CPU first, large batches first, full nodes first.

The order of candidates of LLM-Mesh §4 and §7.2, with the turns and the validation of §5 and the
defragmentation of §7. Its parts can be left out one by one, as the paper's ablations do (§8.4).
"""

from dataclasses import dataclass

from mesh.domain.reasons import DeviceKind, TurnRule
from mesh.policy.interface import InstanceView, NodeView, Rank
from mesh.policy.ranks import any_instance, fullest_instance, fullest_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmMesh:
    name: str = "llm-mesh"
    devices: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)
    partitions: int | None = None
    reclaims: tuple[DeviceKind, ...] = (DeviceKind.CPU, DeviceKind.GPU)
    preempts: bool = True
    consolidates: bool = True
    validates: bool = True
    refuses_late: bool = True
    turns: TurnRule = TurnRule.HEADROOM

    def instance_rank(self, instance: InstanceView) -> Rank:
        return fullest_instance(instance) if self.consolidates else any_instance(instance)

    def node_rank(self, node: NodeView) -> Rank:
        return fullest_node(node)


LLM_MESH = LlmMesh()
ABLATIONS = (
    LlmMesh(name="llm-mesh-no-cpu", devices=(DeviceKind.GPU,)),
    LlmMesh(name="llm-mesh-no-sharing", partitions=1, preempts=False),
    LlmMesh(name="llm-mesh-no-defrag", preempts=False, consolidates=False),
    LlmMesh(name="llm-mesh-no-preemption", preempts=False),
)
